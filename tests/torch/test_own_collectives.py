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
UNUSED_PARAMETERS = {**TWO_BUCKETS, "find_unused_parameters": 1}


def once(known: Any, group: object) -> list[nn.Module]:
    return [Ddp(group, known)]


def nested_and_by_itself(known: Any, group: object) -> list[nn.Module]:
    part = Ddp(group, known)
    return [nn.ModuleList([nn.ModuleList([part])]), part]


def two_on_one_group(known: Any, group: object) -> list[nn.Module]:
    return [Ddp(group, known), Ddp(group, known)]


@pytest.mark.parametrize(
    ("models", "known", "counted", "own"),
    [
        (once, TWO_BUCKETS, {"forward": 3, "backward": 5}, ["backward", "forward"]),
        (once, TWO_BUCKETS, {"forward": 3, "backward": 2}, ["forward"]),
        # A contrastive loss that gathers: its gradients are gathered too.
        (once, TWO_BUCKETS, {"other": 1, "backward": 3}, ["backward", "other"]),
        # An average of the loss.
        (once, TWO_BUCKETS, {"other": 1, "backward": 2}, ["other"]),
        # Two passes through one model, and DDP's buffers.
        (once, TWO_BUCKETS, {"comm_wait": 2, "backward": 4}, []),
        (once, UNUSED_PARAMETERS, {"other": 1, "backward": 3}, ["other"]),
        (once, {"bucket_sizes": "8"}, {"other": 1, "backward": 1}, ["other"]),
        (once, None, {"forward": 1, "backward": 1}, ["backward", "forward"]),
        (once, None, {"backward": 1}, []),
        (nested_and_by_itself, TWO_BUCKETS, {"other": 1, "backward": 2}, ["other"]),
        (nested_and_by_itself, TWO_BUCKETS, {"other": 1, "backward": 3}, ["backward", "other"]),
        (two_on_one_group, TWO_BUCKETS, {"other": 1, "backward": 4}, ["other"]),
    ],
)
def test_where_ddps_group_has_other_collectives_backward_is_not_excused(
    models: Callable[[Any, object], list[nn.Module]],
    known: Any,
    counted: dict[str, int],
    own: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, total = object(), 0
    monkeypatch.setattr(collectives, "_counts", lambda: {id(group): total})
    found = OwnCollectives()
    found.begin(models(known, group))
    for phase, count in counted.items():
        total += count
        found.phase_ended(phase)

    assert found.end() == own
