"""Samples get the labels of their rank, run or node, and are shown while they are fresh."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from agent.node.fake_driver import POWER, FakeDriver
from node import until
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.node import sampling
from otel_ddp.agent.node.gpu.nvml import Device, User
from otel_ddp.agent.node.processes import read_process_stat
from otel_ddp.agent.node.sampling import Sampling
from otel_ddp.agent.node.source import KernelFiles, Measurement
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.vocabulary import catalog

BOARD = Device("GPU-1234", "0", "H100")
OF_BOARD = {"hw.id": "GPU-1234", "hw.type": "gpu", "hw.model": "H100", "gpu": "0"}
FIRST = {"group": "g", "run": "r", "job_type": "train", "node": "n", "rank": "0", "local_rank": "0"}
# Of one run, though with another role.
SECOND = {**FIRST, "job_type": "worker", "rank": "1", "local_rank": "1"}
OF_RUN = {"group": "g", "run": "r", "node": "n"}


def one_board() -> FakeDriver:
    driver = FakeDriver(BOARD)
    busy = Measurement(catalog.HW_GPU_UTILIZATION, 0.5, (("hw.gpu.task", "general"),))
    hot = Measurement(catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE, 1.0, (("reason", "hw_thermal"),))
    calm = Measurement(catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE, 0.0, (("reason", "sw_power"),))
    driver.answers[BOARD.uuid, "power"] = [POWER, busy, hot, calm]
    return driver


def rank(labels: Mapping[str, str], pid: int = 0, **facts: Any) -> Rank:
    return Rank(tuple(labels.items()), pid, 0, facts)


class Bench:
    def __init__(self, driver: FakeDriver, *sources: str) -> None:
        self.ledger = Ledger()
        self.driver = driver
        self.sampling = Sampling(self.ledger, "n", sources, driver)
        for thread in self.sampling.threads():
            thread.keep_running()

    def close(self) -> None:
        self.sampling.stop()

    def told(self, metric: catalog.Metric, *ranks: Rank) -> list[tuple[dict[str, str], Any]]:
        with self.ledger.lock:
            self.sampling.update_series(ranks, {each.pid for each in ranks}, time.time_ns())
        families = dict(self.ledger.families())
        return [(dict(each.labels), each.value) for each in families.get(metric, [])]

    def soon(self, metric: catalog.Metric, *ranks: Rank) -> list[tuple[dict[str, str], Any]]:
        return list(until(lambda: self.told(metric, *ranks), f"{metric.name} to be told"))


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*sources: str, driver: FakeDriver | None = None) -> Bench:
        made.append(Bench(driver or one_board(), *sources))
        return made[-1]

    yield make
    for each in made:
        with closing(each):
            pass


def test_a_board_has_the_labels_of_its_rank_run_or_node(bench: Callable[..., Bench]) -> None:
    here = bench("gpu")
    declared = {"boards": [{"index": 0, "uuid": "1234"}]}
    power = catalog.HW_POWER

    assert here.soon(power) == [({"node": "n", **OF_BOARD}, 300.0)]
    first, second = rank(FIRST, **declared), rank(SECOND, **declared)
    assert here.told(power, first) == [({**FIRST, **OF_BOARD}, 300.0)]
    assert here.told(power, first, second) == [({**OF_RUN, **OF_BOARD}, 300.0)]
    # What makes no sense is nothing.
    for strange in ({"boards": 7}, {"boards": ["?"]}, {"boards": [{"uuid": 3}]}):
        assert here.told(power, rank(FIRST, **strange)) == [({"node": "n", **OF_BOARD}, 300.0)]


def test_a_board_is_described_with_its_measurements(bench: Callable[..., Bench]) -> None:
    driver = one_board()
    driver.answers[BOARD.uuid, "users"] = [User(77, 1077)]
    here = bench("gpu", driver=driver)

    held = here.soon(catalog.OTEL_DDP_GPU_PROCESS_MEMORY_USAGE, rank(FIRST, 77))

    assert held == [({**FIRST, **OF_BOARD}, 1077.0)]
    said = here.sampling.describe()
    assert (said["gpu_driver"], said["gpu_remarks"]) == ("driver 999.1", [])
    (gpu,) = said["gpus"]
    expected = {
        "parent": "",
        "index": "0",
        "name": "H100",
        "uuid": "GPU-1234",
        "labels": FIRST,
        "processes": 1,
        "throttled": ["hw_thermal"],
        "power_w": 300.0,
        "power_limit_w": 700.0,
        "busy_ratio": 0.5,
    }
    assert gpu == expected


def test_the_host_has_the_labels_of_a_run_that_is_alone_on_it(bench: Callable[..., Bench]) -> None:
    here = bench("host")
    limit = catalog.SYSTEM_MEMORY_LIMIT
    other = {**FIRST, "group": "another"}

    assert [labels for labels, _ in here.soon(limit)] == [{"node": "n"}]
    assert [labels for labels, _ in here.told(limit, rank(FIRST), rank(SECOND))] == [OF_RUN]
    assert [labels for labels, _ in here.told(limit, rank(FIRST), rank(other))] == [{"node": "n"}]


def test_the_host_is_limited_by_its_ranks(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Callable[[], Any]] = {}

    class Watched:
        errors = 0

        def __init__(self, pids: Callable[[], Any]) -> None:
            asked["pids"] = pids

        def read(self) -> list[Measurement]:
            return []

    monkeypatch.setattr(sampling, "Host", Watched)
    here = bench("host")

    assert asked["pids"]() == ["self"]
    # A dead process, and one that the agent does not see.
    others = rank(SECOND, 2**22 + 1), rank(SECOND)
    here.told(catalog.SYSTEM_MEMORY_LIMIT, rank(FIRST, os.getpid()), *others)

    assert asked["pids"]() == [os.getpid(), 2**22 + 1]


def test_a_process_has_the_labels_of_its_rank_while_that_is_there(
    bench: Callable[..., Bench],
) -> None:
    here = bench("process")
    stat = read_process_stat(KernelFiles(), "/proc", os.getpid())
    assert stat is not None
    me = Rank(tuple(FIRST.items()), os.getpid(), stat.start, {})

    shown = here.soon(catalog.PROCESS_THREAD_COUNT, me)

    assert [labels for labels, _ in shown] == [FIRST]
    # Known once it was read twice.
    waits = until(here.sampling.cores, "how long the rank has waited for a core")
    assert waits.keys() == {me.labels}
    assert here.told(catalog.PROCESS_THREAD_COUNT) == []
