"""Samples: read in threads of their own; with the labels of their rank, run or node while fresh."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from golden import Golden
from make import Clock
from node import until
from nvml_boards import Boards, h100, show_here, standin_library
from otel_ddp import errors
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.node.processes import read_process_stat
from otel_ddp.agent.node.sampling import Sampling
from otel_ddp.agent.node.source import KernelFiles, Sampler
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.vocabulary import catalog

PATIENCE_S = 300.0


class Pauses(threading.Event):
    """The event that a sampler sleeps on: the test sees each sleep, and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float | None] = []
        self._asleep, self._on = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        self._asleep.release()
        self._on.acquire()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self._on.release()

    def reached(self) -> None:
        assert self._asleep.acquire(timeout=PATIENCE_S)

    def next_one(self) -> None:
        self._on.release()
        self.reached()


class Samples:
    """A sampler that reads once a second, and its clocks."""

    def __init__(self) -> None:
        self.clock, self.pauses, self.go_on = Clock(500.0), Pauses(), threading.Event()
        self.read: Callable[[], Any] = lambda: "a value"
        self.sampler = Sampler(
            "made-up source",
            lambda: self.read(),
            1.0,
            clock=self.clock,
            wall_ns=lambda: int(self.clock.now * 1e9) + 7,
            stopping=self.pauses,
        )

    def starts(self, read: Callable[[], Any]) -> Sampler:
        self.read = read
        self.sampler.thread.keep_running()
        return self.sampler


@pytest.fixture
def samples() -> Iterator[Samples]:
    made = Samples()
    yield made
    made.go_on.set()
    assert made.sampler.stop(PATIENCE_S)


def test_a_sample_has_the_time_at_which_its_reading_began(samples: Samples) -> None:
    def read() -> str:
        samples.clock.now += 0.25
        return "a value"

    assert samples.sampler.fresh() is None
    sampler = samples.starts(read)
    samples.pauses.reached()
    samples.clock.now += 3.0

    assert sampler.fresh() is None
    samples.clock.now -= 0.25
    assert sampler.fresh() == ("a value", 500_000_000_007)
    assert sampler.age_s() == 2.75


def test_readings_begin_a_period_apart_and_late_ones_are_not_caught_up(samples: Samples) -> None:
    takes_s = iter([0.25, 1.0, 7.5, 0.0])

    def read() -> None:
        samples.clock.now += next(takes_s)

    samples.starts(read)
    samples.pauses.reached()
    for _ in range(3):
        samples.pauses.next_one()

    assert samples.pauses.asked == [0.75, 1.0, 1.0, 1.0]


def test_an_error_is_counted_and_the_last_value_stays_and_grows_old(
    samples: Samples, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: Iterator[Any] = iter(["good", RuntimeError("a"), RuntimeError("b"), "good again"])

    def read() -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    sampler = samples.starts(read)
    samples.pauses.reached()
    for _ in range(2):
        samples.clock.now += 1.0
        samples.pauses.next_one()

    assert sampler.fresh() == ("good", 500_000_000_007)
    assert sampler.age_s() == 2.0
    assert errors.failures == {"reading the made-up source": 2}
    assert len(caplog.records) == 1

    samples.pauses.next_one()
    assert sampler.fresh() == ("good again", 502_000_000_007)
    assert sampler.age_s() == 0.0


def test_a_reading_that_hangs_blocks_no_caller_and_its_age_grows(samples: Samples) -> None:
    inside = threading.Event()

    def hang() -> None:
        inside.set()
        samples.go_on.wait()

    sampler = samples.starts(hang)
    assert inside.wait(PATIENCE_S)
    samples.clock.now += 20.0

    # Counted from the start, since none has come to its end.
    assert sampler.age_s() == 20.0
    assert sampler.hangs()
    assert sampler.fresh() is None
    assert sampler.stop(0.0) is False


BOARD = h100()
OF_BOARD = {"hw.id": BOARD.uuid, "hw.type": "gpu", "hw.model": BOARD.name, "gpu": "0"}
FIRST = {"group": "g", "run": "r", "job_type": "train", "node": "n", "rank": "0", "local_rank": "0"}
# Of one run, though with another role.
SECOND = {**FIRST, "job_type": "worker", "rank": "1", "local_rank": "1"}
OF_RUN = {"group": "g", "run": "r", "node": "n"}


def rank(labels: Mapping[str, str], pid: int = 0, **facts: Any) -> Rank:
    return Rank(tuple(labels.items()), pid, 0, facts)


class Bench:
    def __init__(self, *sources: str) -> None:
        self.ledger = Ledger()
        self.sampling = Sampling(self.ledger, "n", sources)
        for thread in self.sampling.threads():
            thread.keep_running()

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

    def make(*sources: str) -> Bench:
        made.append(Bench(*sources))
        return made[-1]

    yield make
    for each in made:
        each.sampling.stop()


@pytest.fixture
def boards(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Boards:
    boards = Boards(tmp_path)
    show_here(boards, standin_library(tmp_path_factory), monkeypatch)
    boards.write([BOARD])
    return boards


def test_a_board_is_described_with_its_measurements(
    bench: Callable[..., Bench], boards: Boards, golden: Golden
) -> None:
    used = h100()
    used.compute = [(77, 1077)]
    boards.write([used])
    here = bench("gpu")

    held = here.soon(catalog.OTEL_DDP_GPU_PROCESS_MEMORY_USAGE, rank(FIRST, 77))

    assert held == [({**FIRST, **OF_BOARD}, 1077.0)]
    said = here.sampling.describe()
    assert (said["gpu_driver"], said["gpu_remarks"]) == ("NVIDIA driver 550.54.14", [])
    golden.check(json.dumps(said["gpus"], indent=1))


def test_the_host_has_the_labels_of_a_run_that_is_alone_on_it(bench: Callable[..., Bench]) -> None:
    here = bench("host")
    limit = catalog.SYSTEM_MEMORY_LIMIT
    other = {**FIRST, "group": "another"}

    assert [labels for labels, _ in here.soon(limit)] == [{"node": "n"}]
    assert [labels for labels, _ in here.told(limit, rank(FIRST), rank(SECOND))] == [OF_RUN]
    assert [labels for labels, _ in here.told(limit, rank(FIRST), rank(other))] == [{"node": "n"}]


def test_a_process_has_the_labels_of_its_rank_while_that_is_there(
    bench: Callable[..., Bench],
) -> None:
    here = bench("process")
    stat = read_process_stat(KernelFiles(), "/proc", os.getpid())
    assert stat is not None
    me = Rank(tuple(FIRST.items()), os.getpid(), stat.start, {})

    shown = here.soon(catalog.PROCESS_MEMORY_USAGE, me)

    assert [labels for labels, _ in shown] == [FIRST]
    # Known once it was read twice.
    waits = until(here.sampling.cores, "how long the rank has waited for a core")
    assert waits.keys() == {me.labels}
    assert here.told(catalog.PROCESS_MEMORY_USAGE) == []
