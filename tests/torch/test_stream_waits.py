"""Which waits of a stream are marked; tests/gpu/test_verdicts.py shows that FSDP's are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from otel_ddp.recording.progress import Phase  # noqa: E402
from otel_ddp.torch.steps.stream_waits import StreamWaits  # noqa: E402
from otel_ddp.vocabulary.words import PHASES, phase_word  # noqa: E402

COMPUTES, OTHER = "the stream that computes", "another stream"
MARKED = ["comm_wait", "forward"]


class Event:
    def wait(self, stream: Any = None) -> None:
        pass


def waits_for(event: Event, stream: str | None = None) -> None:
    event.wait(stream)


class Device:
    """Marks by phase, and the current stream."""

    Event = Event

    def __init__(self) -> None:
        self.current = self.stream = COMPUTES
        self.marks = list[str]()

    def current_stream(self, index: Any) -> str:
        return self.current

    def mark(self, word: int) -> None:
        self.marks.append(phase_word(word >> 56))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def waits(device: Device) -> Any:
    phases = SimpleNamespace(
        opened=[Phase("forward", PHASES["forward"], 0)],
        clock=lambda: 1,
        device_clock=device,
        of_hooks=lambda name: Phase(name, PHASES[name], 0),
    )
    progress: Any = SimpleNamespace(phases=phases, thread=threading.get_ident())
    made = StreamWaits(progress, device, 0)
    made.switch(True)
    yield made
    made.switch(False)
    assert not hasattr(Event.wait, "__wrapped__")
    assert not hasattr(dist.Work.wait, "__wrapped__")


def of_torch(called: Callable[..., None]) -> Callable[..., None]:
    """The function, as if it stood in a module of torch's collectives."""
    globals_ = {**called.__globals__, "__name__": "torch.distributed.fsdp.anything"}
    return type(called)(called.__code__, globals_, None, called.__defaults__)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("wait", "stream", "marks"),
    [
        (of_torch(waits_for), COMPUTES, MARKED),
        (of_torch(waits_for), None, MARKED),
        (of_torch(waits_for), OTHER, []),
        # As for a copy of the next batch.
        (waits_for, COMPUTES, []),
    ],
    ids=["a collective", "on the current stream", "another stream waits", "no collective"],
)
def test_the_wait_of_the_computing_stream_for_a_collective_is_enclosed(
    device: Device, waits: StreamWaits, wait: Any, stream: str | None, marks: list[str]
) -> None:
    wait(Event(), stream)

    assert device.marks == marks


def test_a_loop_that_computes_on_a_stream_of_its_own_has_its_waits_enclosed(
    device: Device, waits: StreamWaits
) -> None:
    device.current = device.stream = OTHER
    of_torch(waits_for)(Event())

    assert device.marks == MARKED


def test_another_thread_and_a_wait_in_the_phase_of_waits_mark_nothing(
    device: Device, waits: StreamWaits
) -> None:
    other = threading.Thread(target=of_torch(waits_for), args=(Event(), COMPUTES))
    other.start()
    other.join()
    waits._phases.opened.append(Phase("comm_wait", PHASES["comm_wait"], 0))
    of_torch(waits_for)(Event(), COMPUTES)

    assert device.marks == []


def test_a_synchronous_collective_is_enclosed_and_an_asynchronous_one_is_not_compared(
    device: Device, waits: StreamWaits
) -> None:
    synchronous, asynchronous = (
        SimpleNamespace(op_id=number, async_op=bool(number)) for number in (0, 1)
    )
    waits.call_began(synchronous)
    waits.call_ended(synchronous)
    assert (device.marks, waits.unseen) == (MARKED, set())
    # From now on each measured step has the hooks of process groups.
    assert waits.has_calls

    device.current = OTHER
    waits.call_began(asynchronous)
    assert waits.unseen == set()
    device.current = COMPUTES
    waits.call_began(asynchronous)
    waits.call_ended(asynchronous)

    assert (device.marks, waits.unseen) == (MARKED, {"forward"})
    waits.switch(True)
    assert waits.unseen == set()
