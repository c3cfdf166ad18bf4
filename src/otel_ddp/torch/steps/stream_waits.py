"""Marks when the device's computing stream waits for other ranks, in measured steps."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import Phase, Progress
from otel_ddp.torch.hooks.called import Called
from otel_ddp.torch.steps.open_step import outside_of_backward

# A wait for an event counts as a wait for ranks only if this package calls it, as FSDP does after a
# collective. Between FSDP's frame and `Event.wait` are at most two methods of `Stream`.
_COLLECTIVES = "torch.distributed"
_MOST_FRAMES = 3
# Estimated thread time for marking one wait; the budget multiplies it by a measured factor.
_EACH_NS = 12_000
# Estimated thread time for the two hooks at one call to a process group.
_CALL_NS = 28_000


class StreamWaits:
    """Puts a mark on the computing stream before and after each wait, so it counts as `comm_wait`.

    The host does not wait for the stream: the device clock reads later how long each wait took.
    """

    def __init__(self, progress: Progress, module: Any, index: int | None) -> None:
        """*module*: the device's module, such as torch.cuda. *index*: the device's index."""
        self._progress, self._phases = progress, progress.phases
        self._wait: Phase = progress.phases.of_hooks("comm_wait")
        self._module, self._index = module, index
        self._wrapped: list[Called] = []
        # `_open` identifies the open wait: by the id of the awaited object, or by ~ and the id of a
        # call; 0: none. `_marked`, `_calls`: how many waits were marked and calls made in this
        # step.
        self._open = self._marked = self._calls = 0
        self.has_calls = False
        """Whether collectives run on the computing stream itself, so that each measured step needs
        the hooks of process groups. Found in steps in which calls are counted."""
        self.unseen: set[str] = set()
        """The phases of this step that have collectives whose waits cannot be marked."""

    def step_ended(self) -> int:
        """A step ends; return the estimated thread time that marking its waits took."""
        took_ns = self._marked * _EACH_NS + self._calls * _CALL_NS
        self._marked = self._calls = self._open = 0
        return took_ns

    def switch(self, on: bool) -> None:
        """Start or stop marking waits; called on the training thread, between steps."""
        self.unseen.clear()
        if on is bool(self._wrapped):
            return
        if not on:
            self.take_off()
            return
        work = sys.modules["torch.distributed"].Work
        self._wrapped = [
            Called(self._module.Event, "wait", self._ended, begins=self._event_began),
            Called(work, "wait", self._ended, begins=self._work_began),
        ]

    def take_off(self) -> None:
        """Restore torch."""
        wrapped, self._wrapped = self._wrapped, []
        for each in wrapped:
            each.take_off()

    # -- in a step

    def call_began(self, call: Any) -> None:
        """A process group is called. A synchronous collective may run on the computing stream."""
        self._calls += 1
        if not self._is_own(None):
            return
        if call.async_op:
            # An asynchronous call runs on its own stream. Compiled code waits for it without
            # calling `wait` in Python, so the wait is not seen.
            self.unseen.add(self._phases.opened[-1].name)
        else:
            self.has_calls = True
            self._began(~call.op_id)

    @errors.contained()
    def call_ended(self, call: Any) -> None:
        """The process group has launched the collective."""
        self._ended_key(~call.op_id)

    @errors.contained()
    def _event_began(self, event: Any, stream: Any = None) -> None:
        if self._is_own(stream) and _for_collective(sys._getframe(3)):
            self._began(id(event))

    @errors.contained()
    def _work_began(self, work: Any, *_: Any, **__: Any) -> None:
        if self._is_own(None):
            self._began(id(work))

    def _is_own(self, stream: Any) -> bool:
        """Whether the given (or current) stream is the training's computing stream."""
        if (clock := self._phases.device_clock) is None:
            return False
        # The computing stream is the one on which the phase began: a loop may use its own stream.
        if (stream or self._module.current_stream(self._index)) != clock.stream:
            return False
        return get_ident() == self._progress.thread or not outside_of_backward()

    def _began(self, key: int) -> None:
        # Put no marks inside the phase comm_wait at the end of backward, all of which is a wait.
        if not self._open and self._phases.opened[-1].name != self._wait.name:
            self._open = key
            self._marked += 1
            self._mark(self._wait)

    def _ended(self, waited: Any, *_: Any, **__: Any) -> None:
        self._ended_key(id(waited))

    def _ended_key(self, key: int) -> None:
        if self._open == key:
            self._open = 0
            self._mark(self._phases.opened[-1])

    def _mark(self, phase: Phase) -> None:
        if (clock := self._phases.device_clock) is not None:
            clock.mark(phase.base + self._phases.clock())


def waits_for(device: torch.device, progress: Progress) -> StreamWaits | None:
    """The `StreamWaits` of this device; None if `Event.wait` is not a Python method, or if process
    groups have no hooks."""
    module, groups = module_of(device), sys.modules["torch.distributed"].ProcessGroup
    waits = "wait" in vars(getattr(module, "Event", None) or object)
    if not waits or not hasattr(groups, "register_pre_hook"):
        return None
    return StreamWaits(progress, module, device.index)


def _for_collective(frame: Any) -> bool:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(_COLLECTIVES):
            return True
        frame = frame.f_back
    return False
