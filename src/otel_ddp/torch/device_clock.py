"""Times phases on the device: records events between phases, and reads the events it has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import DevicePosition, DeviceTimes
from otel_ddp.vocabulary.words import PHASE_CODE

# Most steps and marks that may wait for the device to pass them. A host that reads its loss only
# every 100 or 200 steps runs that many steps ahead of its device. A step mostly has ten marks; with
# FSDP, waits add five marks for each layer and micro-batch.
_MOST_STEPS = 256
_MOST_MARKS = 16_384
# The device keeps pace with the host if it reaches a mark within this time after the host recorded
# the mark (a launch takes some microseconds), plus this part of the phase that ends there.
_SOON_NS = 100_000
_SOON_PART = 16
# The clocks of host and device drift apart by less than one part in this many.
_DRIFT = 20_000

_SHIFT, _VALUE = layout.CODE_SHIFT, layout.WORD_VALUE
_BEGAN, _ENDED = layout.STEPS_BEGAN << _SHIFT, layout.STEP_ENDED << _SHIFT
_NUMBER, _LAG = layout.STEP_NUMBER << _SHIFT, layout.STEP_LAG << _SHIFT
_PACED = layout.STEP_PACED << _SHIFT
_IN_MARK = layout.IN_MARK // 8


class _Mark:
    """An event on the device's stream; the phase in its journal word begins at this event."""

    __slots__ = ("event", "not_before_ns", "word")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.word = 0
        # A time (since the journal's creation) at which a query found that the device had not yet
        # reached the mark; 0 without such a query.
        self.not_before_ns = 0


class _Marks(list[_Mark]):
    """The marks of one step, the last at its end; if `number` is 0, they are a part of a step."""

    __slots__ = ("number", "passed")

    def __init__(self) -> None:
        self.number = 0
        # How many of the marks the device has passed.
        self.passed = 0


class _DeviceTime:
    """The device's timeline, up to the last mark that it has passed."""

    def __init__(self, times: DeviceTimes, pool: list[_Mark]) -> None:
        self._times, self._pool = times, pool
        # The last resolved mark; the phase that began there ends at the next mark.
        self.since: _Mark | None = None
        # When the device reached this mark, on the device's clock; and by how much the host's clock
        # is ahead of the device's, at least.
        self._reached_ns = self._offset_ns = 0
        # The journal words of the step that is being resolved; None until a first step ends.
        self._words: list[int] | None = None
        self._paced: dict[int, int] = {}

    def begin_anew(self) -> None:
        """Reset after a gap in the marks, during which the device's work is unknown."""
        self._words = None
        self._paced = {}
        if self.since is not None:
            self._pool.append(self.since)
            self.since = None

    def passed(self, marks: _Marks) -> None:
        # The loop below runs at least ten times per step, so it uses local variables.
        since, reached_ns, offset_ns = self.since, self._reached_ns, self._offset_ns
        words, paced, pool = self._words, self._paced, self._pool
        spent_ms: dict[int, float] = {}
        for mark in marks:
            word = mark.word
            recorded_ns = word & _VALUE
            not_before_ns = recorded_ns
            if mark.not_before_ns:
                # A query found the mark pending later than it was recorded: use that time.
                not_before_ns, mark.not_before_ns = mark.not_before_ns, 0
            if since is None:
                # At the first mark, set the device's time to the host's.
                since, reached_ns, offset_ns = mark, recorded_ns, not_before_ns - recorded_ns
                continue
            took_ms = since.event.elapsed_time(mark.event)
            if took_ms > 0:
                took_ns = int(took_ms * 1e6 + 0.5)
                reached_ns += took_ns
                # The device cannot reach a mark before the host has recorded it, nor before a query
                # that found it pending: this gives a lower bound of the clocks' offset.
                if not_before_ns - reached_ns > offset_ns:
                    offset_ns = not_before_ns - reached_ns
                code = since.word >> _SHIFT
                if reached_ns + offset_ns - recorded_ns <= _SOON_NS + took_ns // _SOON_PART:
                    paced[code] = paced.get(code, 0) + took_ns
                spent_ms[code] = spent_ms.get(code, 0.0) + took_ms
                pool.append(since)
                since = mark
            else:
                # This mark is on another stream, which reached it before the last mark. So no time
                # has passed: only replace the phase by this mark's phase, which is newer.
                since.word = word
                pool.append(mark)
            if words is not None:
                words.append(word - recorded_ns + reached_ns)
        drift_ns = sum(spent_ms.values()) * 1e6 // _DRIFT
        self.since, self._reached_ns = since, reached_ns
        self._offset_ns = offset_ns - int(drift_ns)
        for code, each_ms in spent_ms.items():
            self._times.add_device_time(code, each_ms / 1000)

    def step_passed(self, number: int, recorded_ns: int) -> None:
        """The device has reached the end of a step: write the step's words to the journal."""
        reached_ns, paced = self._reached_ns, self._paced
        words, self._words = self._words, []
        self._paced = {}
        if words is None:
            words = [_BEGAN + reached_ns]
            if self.since is not None:
                words.append(self.since.word & ~_VALUE | reached_ns)
        else:
            # The last word begins the next step: put it after the words that end this one.
            following = words.pop()
            words.append(_NUMBER | number)
            words.append(_LAG | max(reached_ns + self._offset_ns - recorded_ns, 0))
            for code, took_ns in paced.items():
                phase = code & PHASE_CODE
                words.append(_PACED | phase << layout.PACED_SHIFT | took_ns)
            words += (_ENDED + reached_ns, following)
        self._times.add_device_words(words)


class DeviceClock:
    """Times phases on one device without waiting for it: only queries which events have passed."""

    def __init__(self, device: torch.device, *, module: Any, times: DeviceTimes) -> None:
        self.failed = False
        self.stream: Any = None
        """The stream of the last mark."""
        self._index = device.index
        self._module = module
        self._stream = module.current_stream
        self._capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        self._times = times
        self._stopped = self._paused = False
        self._discards = False
        self._pool: list[_Mark] = []
        # Marks of the current step. Autograd's thread adds those of backward, without a lock:
        # `append` is atomic.
        self._open = _Marks()
        # Marks of steps that are over on the host, oldest first; empty for discarded steps.
        self._closed: deque[_Marks] = deque()
        self._mark_count = 0
        self._time = _DeviceTime(times, self._pool)

    def mark(self, word: int) -> None:
        """Record an event at which the device begins a phase. *word*: the phase and host time."""
        if self._stopped or self._discards or self._paused:
            return
        try:
            if self._capturing():
                # Discard this step: captured work does not run now, and our event would run in
                # every replay.
                self._discards = True
                return
            try:
                mark = self._pool.pop()
            except IndexError:
                mark = _Mark(self._module.Event(enable_timing=True))
            mark.word = word
            # Pass the device's index, as another device may be the current one of this thread.
            self.stream = stream = self._stream(self._index)
            # Recording blocks while the launch queue is full. Torch holds the GIL then, so no
            # thread of ours could report it. The agent reads this flag from shared memory instead.
            words = self._times.present_words
            words[_IN_MARK] = 1
            try:
                mark.event.record(stream)
            finally:
                words[_IN_MARK] = 0
            marks = self._open
            marks.append(mark)
            self._discards = len(marks) >= _MOST_MARKS
        except RuntimeError:
            errors.reraise_foreign()
            self._fail()

    def step_finished(self, number: int, now_ns: int) -> None:
        """Step *number* ends at the last mark; resolve all marks that the device has passed.

        *now_ns*: the time since the journal's creation.
        """
        if self._stopped:
            return
        try:
            self._close_step(number)
            self._resolve(now_ns)
        except RuntimeError:
            errors.reraise_foreign()
            self._fail()

    def pause(self) -> None:
        """Set no marks until `resume`: a step has ended, and the next ones are not measured."""
        self._paused = True

    def resume(self, number: int, word: int) -> None:
        """Set marks again: unmeasured step *number* ends at the time in *word*.

        How far the device lags behind the host at this time is recorded for step *number*.
        """
        self._paused = False
        self.mark(word)
        self._close_step(number)

    def position(self) -> DevicePosition | None:
        """The phase and step that the device is in; another thread calls this during a hang."""
        if self._stopped or self._discards:
            return None
        reached, held = self._time.since, [*self._closed, self._open]
        step = None
        for at, mark in [(at, mark) for at, marks in enumerate(held) for mark in [*marks]]:
            if not mark.event.query():
                # Only steps that the host has finished have a number. The device is in the first of
                # them that ends at or after this mark.
                numbers = [marks.number for marks in held[at:] if marks.number]
                step = numbers[0] - 1 if numbers else None
                break
            reached = mark
        if reached is None:
            return None
        return DevicePosition(reached.word >> _SHIFT & PHASE_CODE, step)

    def close(self) -> None:
        """Resolve the marks that the device has passed, stop measuring, and release all events."""
        try:
            if not self._stopped:
                self._stopped = True
                self._close_step(0)
                self._resolve(0)
        except RuntimeError:
            errors.reraise_foreign()
            self.failed = True
        finally:
            self._pool.clear()
            self._open = _Marks()
            self._closed.clear()
            self._mark_count = 0
            self._time.since = None

    def _fail(self) -> None:
        # Stop for good: a failed device does not recover, and the training fails by itself.
        self.failed = self._stopped = True
        self.close()

    def _close_step(self, number: int) -> None:
        """Close the open marks. *number*: the step that they end, or 0 if they don't end a step."""
        marks, self._open = self._open, _Marks()
        if self._discards:
            self._discards = False
            self._pool += marks
            marks = _Marks()
        elif not marks:
            return
        marks.number = number
        self._closed.append(marks)
        self._mark_count += len(marks)
        while len(self._closed) > _MOST_STEPS or self._mark_count > _MOST_MARKS:
            oldest = self._closed.popleft()
            self._mark_count -= len(oldest)
            self._pool += oldest
            self._time.begin_anew()

    def _resolve(self, now_ns: int) -> None:
        # Stop at a capture of a CUDA graph: a query during the capture would invalidate the graph.
        while self._closed and not self._capturing():
            marks = self._closed[0]
            # Query every mark, not only the last one: with several streams, the device may pass a
            # later mark before an earlier one.
            for at in range(marks.passed, len(marks)):
                if not marks[at].event.query():
                    marks[at].not_before_ns, marks.passed = now_ns, at
                    return
            self._closed.popleft()
            self._mark_count -= len(marks)
            if not marks:
                self._time.begin_anew()
                continue
            try:
                self._time.passed(marks)
            except BaseException:
                # After any exception, even one of a signal handler, these marks are lost.
                self._time.begin_anew()
                raise
            if marks.number:
                self._time.step_passed(marks.number, marks[-1].word & _VALUE)


def clock_for(
    device: torch.device,
    times: DeviceTimes,
    *,
    module: Callable[[torch.device], Any] = module_of,
) -> DeviceClock | None:
    """A clock for this device; None if its module has no events that can be timed."""
    found = module(device)
    event = getattr(found, "Event", None)
    if not hasattr(found, "current_stream") or not hasattr(event, "elapsed_time"):
        return None
    return DeviceClock(device, module=found, times=times)
