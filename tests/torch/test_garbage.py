"""Pauses of the garbage collector are timed, and a signal that comes in one is not lost."""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from otel_ddp.torch.hooks import runtime


@pytest.fixture(autouse=True)
def _no_other_collection() -> Iterator[None]:
    # Those of others, which may be Python's, are put aside: hypothesis has one.
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    gc.collect()
    gc.disable()
    yield
    runtime.detach_from_gc()
    gc.enable()
    left, gc.callbacks[:] = list(gc.callbacks), callbacks
    assert left == []


def a_stepper() -> Any:
    return SimpleNamespace(progress=SimpleNamespace(work=SimpleNamespace(gc_ns=5)))


def readings(*each_ns: int) -> Callable[[], int]:
    return iter(each_ns).__next__


def test_the_time_of_each_collection_is_added() -> None:
    stepper = a_stepper()
    runtime.attach_to_gc(stepper, clock=readings(0, 100, 130, 200, 250))

    gc.collect()
    once = stepper.progress.work.gc_ns
    gc.collect()

    assert (once, stepper.progress.work.gc_ns) == (35, 85)


class Preempted(Exception):
    """What users raise in their handlers."""


def test_what_a_handler_raises_while_garbage_is_collected_reaches_the_loop() -> None:
    # Python's own would look for signals itself, and call the handler in the finaliser.
    send = ctypes.CDLL(None)["raise"]

    class Interrupting:
        __del__ = staticmethod(partial(send, int(signal.SIGUSR1)))

        def __init__(self) -> None:
            self.itself = self

    def handle(number: int, frame: Any) -> None:
        raise Preempted

    stepper = a_stepper()
    runtime.attach_to_gc(stepper)
    Interrupting()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Preempted):
            gc.collect()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert stepper.progress.work.gc_ns > 5
