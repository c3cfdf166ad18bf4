"""When a phase is reported to have collectives of the program's own, and when no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from otel_ddp.torch import collectives
from otel_ddp.torch.collectives import SENDS, OwnCollectives


def test_the_answer_about_a_phase_is_stable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = 0
    monkeypatch.setattr(collectives, "_counts", lambda: {1: counted})
    found = OwnCollectives()

    def looked(*, busy: bool) -> list[str]:
        nonlocal counted
        found.begin([])
        counted += busy
        found.phase_ended("other")
        return found.end()

    # Every other step, then none any more.
    assert [looked(busy=not number % 2) for number in range(6)] == [["other"]] * 6
    assert [looked(busy=False) for _ in range(6)] == [["other"]] * 6
    assert looked(busy=False) == []


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def send() -> None:
    dist.send(torch.ones(1), 1)


def send_elsewhere() -> None:
    thread = Thread(target=send)
    thread.start()
    thread.join()


def exchange() -> None:
    ways = dist.isend, dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(way, torch.ones(1), 1) for way in ways]):
        work.wait()


@pytest.mark.parametrize(
    ("act", "seen"), [(send, [SENDS]), (exchange, [SENDS]), (send_elsewhere, [])]
)
def test_sends_are_seen_in_counted_steps_and_on_the_training_thread(
    group: None, act: Callable[[], None], seen: list[str]
) -> None:
    before = vars(dist.ProcessGroup)["send"]
    found = OwnCollectives()
    found.begin([])

    act()

    assert found.end() == seen
    assert vars(dist.ProcessGroup)["send"] is before


class Ddp(DistributedDataParallel):
    """As much of it as is asked for, without a process group."""

    def __init__(self, group: object, known: Any) -> None:
        nn.Module.__init__(self)
        self.process_group, self._known = group, known

    def _get_ddp_logging_data(self) -> Any:
        if self._known is None:
            raise RuntimeError("another version of torch")
        return self._known


TWO_BUCKETS = {"bucket_sizes": "8", "rebuilt_bucket_sizes": "4, 4", "find_unused_parameters": 0}


@pytest.mark.parametrize(
    ("known", "counted", "own"),
    [
        (TWO_BUCKETS, {"forward": 3, "backward": 5}, ["backward", "forward"]),
        (TWO_BUCKETS, {"forward": 3, "backward": 2}, ["forward"]),
        # A contrastive loss that gathers: its gradients are gathered too.
        (TWO_BUCKETS, {"other": 1, "backward": 3}, ["backward", "other"]),
        # An average of the loss.
        (TWO_BUCKETS, {"other": 1, "backward": 2}, ["other"]),
        # Two passes through one model, and DDP's buffers.
        (TWO_BUCKETS, {"comm_wait": 2, "backward": 4}, []),
        ({**TWO_BUCKETS, "find_unused_parameters": 1}, {"other": 1, "backward": 3}, ["other"]),
        ({"bucket_sizes": "8"}, {"other": 1, "backward": 1}, ["other"]),
        (None, {"forward": 1, "backward": 1}, ["backward", "forward"]),
        (None, {"backward": 1}, []),
    ],
)
def test_where_ddps_group_has_other_collectives_backward_is_not_excused(
    known: Any, counted: dict[str, int], own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, total = object(), 0
    monkeypatch.setattr(collectives, "_counts", lambda: {id(group): total})
    found = OwnCollectives()
    found.begin([Ddp(group, known)])
    for phase, count in counted.items():
        total += count
        found.phase_ended(phase)

    assert found.end() == own


@pytest.mark.parametrize(("counted", "own"), [(2, ["other"]), (3, ["backward", "other"])])
def test_a_ddp_inside_of_another_module_is_found_and_counts_once(
    counted: int, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, total = object(), 0
    monkeypatch.setattr(collectives, "_counts", lambda: {id(group): total})
    found, part = OwnCollectives(), Ddp(group, TWO_BUCKETS)
    found.begin([nn.ModuleList([nn.ModuleList([part])]), part])
    for phase, count in {"other": 1, "backward": counted}.items():
        total += count
        found.phase_ended(phase)

    assert found.end() == own


def test_ddps_on_one_group_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group, total = object(), 0
    monkeypatch.setattr(collectives, "_counts", lambda: {id(group): total})
    found = OwnCollectives()
    found.begin([Ddp(group, TWO_BUCKETS), Ddp(group, TWO_BUCKETS)])
    for phase, count in {"other": 1, "backward": 4}.items():
        total += count
        found.phase_ended(phase)

    assert found.end() == ["other"]
