"""Times phases on the device: records events between them, and reads those that it has passed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from otel_ddp import containment
from otel_ddp.recording.device_scalars import module_of

_STEPS_TO_WAIT = 2
_MOST_STEPS = 64
_MOST_MARKS = 4096
# A step of many micro-batches is resolved in parts of this many marks, as if each were a step.
_LONG_STEP = _MOST_MARKS // _MOST_STEPS


class _Mark:
    """From this event on, the device works on the phase with this code."""

    __slots__ = ("code", "event")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.code = 0


class DeviceClock:
    """Never waits for the device: it only asks which events it has passed."""

    def __init__(
        self, device: torch.device, *, module: Any, charge: Callable[[int, float], None]
    ) -> None:
        self.dropped = 0
        """Steps, or parts of very long ones, that are not charged to any phase."""
        self.failed = False
        self._index = device.index
        self._module = module
        self._charge = charge
        self._thread = threading.get_ident()
        self._stopped = False
        self._spoilt = False
        self._pool: list[_Mark] = []
        # Marks of the present step. Those of backward come from autograd's own thread, and an
        # append needs no lock.
        self._open: list[_Mark] = []
        # Steps that are over, oldest first; one that was spoilt is empty.
        self._closed: deque[list[_Mark]] = deque()
        self._held = 0
        # The last mark that was resolved: what it began ends with the next one.
        self._since: _Mark | None = None

    def mark(self, code: int) -> None:
        """From here on the device works on the phase with this code."""
        if self._stopped or self._spoilt:
            return
        try:
            module = self._module
            if module.is_current_stream_capturing():
                # Captured work does not run now, and an event of ours would run with every replay.
                # Such a step is unlike the others: nothing of it is charged.
                self._spoilt = True
                return
            try:
                mark = self._pool.pop()
            except IndexError:
                mark = _Mark(module.Event(enable_timing=True))
            mark.code = code
            # By its index: the current device of this thread, or of autograd's, may be another.
            mark.event.record(module.current_stream(self._index))
            self._open.append(mark)
            if len(self._open) >= _LONG_STEP:
                self._long_step()
        except RuntimeError:
            containment.reraise_foreign()
            self._fail()

    def step_finished(self) -> None:
        """The step is over; charge for the steps before it that the device is done with."""
        if self._stopped:
            return
        self._thread = threading.get_ident()
        try:
            self._close_step()
            self._resolve()
        except RuntimeError:
            containment.reraise_foreign()
            self._fail()

    def close(self) -> None:
        """Charge for what the device is done with, measure nothing more, and keep no event."""
        try:
            if not self._stopped:
                self._stopped = True
                self._close_step()
                self._resolve(steps_to_wait=0)
        except RuntimeError:
            containment.reraise_foreign()
            self.failed = True
        finally:
            self._pool = []
            self._open = []
            self._closed.clear()
            self._held = 0
            self._since = None

    def _fail(self) -> None:
        # A device that has failed stays so, and training fails at it without us.
        self.failed = self._stopped = True
        self.close()

    def _long_step(self) -> None:
        if threading.get_ident() == self._thread:
            self._close_step()
            self._resolve()
        elif len(self._open) >= _MOST_MARKS:
            self._spoilt = True

    def _close_step(self) -> None:
        marks, self._open = self._open, []
        if self._spoilt:
            self._spoilt = False
            self.dropped += 1
            self._pool += marks
            marks = []
        elif not marks:
            return
        self._closed.append(marks)
        self._held += len(marks)
        while len(self._closed) > _MOST_STEPS or self._held > _MOST_MARKS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        marks = self._closed.popleft()
        if marks:
            self.dropped += 1
            self._held -= len(marks)
            self._pool += marks
        self._begin_anew()

    def _begin_anew(self) -> None:
        """There is a gap, in which it is unknown what the device did."""
        if self._since is not None:
            self._pool.append(self._since)
            self._since = None

    def _resolve(self, steps_to_wait: int = _STEPS_TO_WAIT) -> None:
        # Asking for an event would spoil a graph that is being captured.
        while len(self._closed) > steps_to_wait and not self._module.is_current_stream_capturing():
            marks = self._closed[0]
            # The last one first, for it mostly decides; but where a step used several streams, it
            # may be done before the others.
            if not all(mark.event.query() for mark in reversed(marks)):
                return
            self._closed.popleft()
            self._held -= len(marks)
            if not marks:
                self._begin_anew()
            for mark in marks:
                self._passed(mark)

    def _passed(self, mark: _Mark) -> None:
        since = self._since
        if since is None:
            self._since = mark
            return
        seconds = since.event.elapsed_time(mark.event) / 1000
        if seconds > 0:
            self._charge(since.code, seconds)
            self._since = mark
            self._pool.append(since)
        else:
            # This stream was ahead of the other one: its phase is the newer one all the same.
            since.code = mark.code
            self._pool.append(mark)


def clock_for(
    device: torch.device,
    charge: Callable[[int, float], None],
    *,
    module: Callable[[torch.device], Any] = module_of,
) -> DeviceClock | None:
    """A clock for this device, None where it cannot be timed without waiting for it."""
    found = module(device)
    needed = ("current_stream", "is_current_stream_capturing")
    if not all(hasattr(found, name) for name in needed):
        return None
    if not hasattr(getattr(found, "Event", None), "elapsed_time"):
        return None
    return DeviceClock(device, module=found, charge=charge)
