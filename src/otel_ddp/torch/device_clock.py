"""Times phases on the device: records events between them, and reads those that it has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.phases import DevicePosition, DeviceTimes
from otel_ddp.vocabulary.words import PHASE_CODE

# A host that asks for its loss every 100 or 200 steps is that far ahead of its device. Some ten
# marks a step are 2,560 events, fewer than a step of many micro-batches may hold.
_MOST_STEPS = 256
_MOST_MARKS = 4096
# The device keeps up with the host if it reaches a mark this soon after it was recorded, or within
# this part of the phase that ends there: a launch takes some microseconds.
_SOON_NS = 100_000
_SOON_PART = 16
# Clocks of hosts and devices differ by less than one part in this many.
_DRIFT = 20_000

_SHIFT, _VALUE = layout.CODE_SHIFT, layout.WORD_VALUE
_BEGAN, _ENDED = layout.STEPS_BEGAN << _SHIFT, layout.STEP_ENDED << _SHIFT
_NUMBER, _LAG = layout.STEP_NUMBER << _SHIFT, layout.STEP_LAG << _SHIFT
_PACED = layout.STEP_PACED << _SHIFT
_IN_MARK = layout.IN_MARK // 8


class _Mark:
    """From this event on, the device works on the phase of this word of the journal."""

    __slots__ = ("event", "not_before_ns", "word")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.word = 0
        # A time at which the device had not reached it, since the making of the journal.
        self.not_before_ns = 0


class _Marks(list[_Mark]):
    """Marks of one step; the last one is its end if it has a number."""

    __slots__ = ("number", "passed")

    def __init__(self) -> None:
        self.number = 0
        # How many of them the device has passed.
        self.passed = 0


class _DeviceTime:
    """How far the device's time is known, from the marks that it has passed."""

    def __init__(self, times: DeviceTimes, pool: list[_Mark]) -> None:
        self._times, self._pool = times, pool
        # The last mark that was resolved: what it began ends with the next one.
        self.since: _Mark | None = None
        # When the device reached it, and the least by which its clock is behind the host's there.
        self._reached_ns = self._behind_ns = 0
        # The words of the step that is being resolved; None until the end of one is known.
        self._words: list[int] | None = None
        self._paced: dict[int, int] = {}

    def begin_anew(self) -> None:
        """There is a gap, in which it is unknown what the device did."""
        self._words = None
        self._paced = {}
        if self.since is not None:
            self._pool.append(self.since)
            self.since = None

    def passed(self, marks: _Marks) -> None:
        # Ten times a step: what it uses again and again is local.
        since, reached_ns, behind_ns = self.since, self._reached_ns, self._behind_ns
        words, paced, pool = self._words, self._paced, self._pool
        spent_ms: dict[int, float] = {}
        for mark in marks:
            word = mark.word
            recorded_ns = word & _VALUE
            not_before_ns = recorded_ns
            if mark.not_before_ns:
                # It was asked for later than it was recorded.
                not_before_ns, mark.not_before_ns = mark.not_before_ns, 0
            if since is None:
                # Its own clock begins where the host is.
                since, reached_ns, behind_ns = mark, recorded_ns, not_before_ns - recorded_ns
                continue
            took_ms = since.event.elapsed_time(mark.event)
            if took_ms > 0:
                took_ns = int(took_ms * 1e6 + 0.5)
                reached_ns += took_ns
                # No device reaches a mark before the host has recorded it, nor one that was asked
                # for and not reached before that.
                if not_before_ns - reached_ns > behind_ns:
                    behind_ns = not_before_ns - reached_ns
                code = since.word >> _SHIFT
                if reached_ns + behind_ns - recorded_ns <= _SOON_NS + took_ns // _SOON_PART:
                    paced[code] = paced.get(code, 0) + took_ns
                spent_ms[code] = spent_ms.get(code, 0.0) + took_ms
                pool.append(since)
                since = mark
            else:
                # This stream was ahead of the other one: its phase is the newer one all the same.
                since.word = word
                pool.append(mark)
            if words is not None:
                words.append(word - recorded_ns + reached_ns)
        drift_ns = sum(spent_ms.values()) * 1e6 // _DRIFT
        self.since, self._reached_ns = since, reached_ns
        self._behind_ns = behind_ns - int(drift_ns)
        for code, each_ms in spent_ms.items():
            self._times.add_device_time(code, each_ms / 1000)

    def step_passed(self, number: int, recorded_ns: int) -> None:
        """The device has reached the end of a step: write down what is known of it."""
        reached_ns, paced = self._reached_ns, self._paced
        words, self._words = self._words, []
        self._paced = {}
        if words is None:
            words = [_BEGAN + reached_ns]
            if self.since is not None:
                words.append(self.since.word & ~_VALUE | reached_ns)
        else:
            # The next phase begins with the next step.
            following = words.pop()
            words.append(_NUMBER | number)
            words.append(_LAG | max(reached_ns + self._behind_ns - recorded_ns, 0))
            for code, took_ns in paced.items():
                phase = code & PHASE_CODE
                words.append(_PACED | phase << layout.PACED_SHIFT | took_ns)
            words += (_ENDED + reached_ns, following)
        self._times.add_device_words(words)


class DeviceClock:
    """Never waits for the device: it only asks which events it has passed."""

    def __init__(self, device: torch.device, *, module: Any, times: DeviceTimes) -> None:
        self.failed = False
        self._index = device.index
        self._module = module
        self._stream = module.current_stream
        self._capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        self._times = times
        self._stopped = self._paused = False
        self._spoilt = False
        self._pool: list[_Mark] = []
        # Marks of the present step. Those of backward come from autograd's own thread, and an
        # append needs no lock.
        self._open = _Marks()
        # Steps that are over, oldest first; one that was spoilt is empty.
        self._closed: deque[_Marks] = deque()
        self._held = 0
        self._time = _DeviceTime(times, self._pool)

    def mark(self, word: int) -> None:
        """From here on the device works on a phase: the journal's word for it, with the time."""
        if self._stopped or self._spoilt or self._paused:
            return
        try:
            if self._capturing():
                # Captured work does not run now, and an event of ours would run with every replay.
                # Such a step is unlike the others: nothing of it is charged.
                self._spoilt = True
                return
            try:
                mark = self._pool.pop()
            except IndexError:
                mark = _Mark(self._module.Event(enable_timing=True))
            mark.word = word
            # By its index: the current device of this thread, or of autograd's, may be another.
            stream = self._stream(self._index)
            # Where the launch queue is full this waits for a place, and no other thread can say so:
            # events of torch keep the interpreter's lock.
            words = self._times.present_words
            words[_IN_MARK] = 1
            try:
                mark.event.record(stream)
            finally:
                words[_IN_MARK] = 0
            marks = self._open
            marks.append(mark)
            self._spoilt = len(marks) >= _MOST_MARKS
        except RuntimeError:
            errors.reraise_foreign()
            self._fail()

    def step_finished(self, number: int, now_ns: int) -> None:
        """The step with this number is over, at the last mark; charge for what is known by now.

        *now_ns*: since the making of the journal.
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
        """A step has ended, and those that follow are not measured: all of them are one stretch."""
        self._paused = True

    def resume(self, number: int, word: int) -> None:
        """The step of this number ends at this word, and the next one is measured.

        How far behind its host the device is there counts in that one.
        """
        self._paused = False
        self.mark(word)
        self._close_step(number)

    def position(self) -> DevicePosition | None:
        """Where the device is: for another thread, while the training stands still."""
        if self._stopped or self._spoilt:
            return None
        reached, held = self._time.since, [*self._closed, self._open]
        step = None
        for at, mark in [(at, mark) for at, marks in enumerate(held) for mark in [*marks]]:
            if not mark.event.query():
                # The step that it is in has a number if the host is done with it.
                numbers = [marks.number for marks in held[at:] if marks.number]
                step = numbers[0] - 1 if numbers else None
                break
            reached = mark
        if reached is None:
            return None
        return DevicePosition(reached.word >> _SHIFT & PHASE_CODE, step)

    def close(self) -> None:
        """Charge for what the device is done with, measure nothing more, and keep no event."""
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
            self._held = 0
            self._time.since = None

    def _fail(self) -> None:
        # A device that has failed stays so, and training fails at it without us.
        self.failed = self._stopped = True
        self.close()

    def _close_step(self, number: int) -> None:
        """*number*: 0 for a part of a step."""
        marks, self._open = self._open, _Marks()
        if self._spoilt:
            self._spoilt = False
            self._pool += marks
            marks = _Marks()
        elif not marks:
            return
        marks.number = number
        self._closed.append(marks)
        self._held += len(marks)
        while len(self._closed) > _MOST_STEPS or self._held > _MOST_MARKS:
            oldest = self._closed.popleft()
            self._held -= len(oldest)
            self._pool += oldest
            self._time.begin_anew()

    def _resolve(self, now_ns: int) -> None:
        # Asking for an event would spoil a graph that is being captured.
        while self._closed and not self._capturing():
            marks = self._closed[0]
            # Each is asked for until it is passed. In a step that used several streams, a later one
            # may be passed before an earlier one.
            for at in range(marks.passed, len(marks)):
                if not marks[at].event.query():
                    marks[at].not_before_ns, marks.passed = now_ns, at
                    return
            self._closed.popleft()
            self._held -= len(marks)
            if not marks:
                self._time.begin_anew()
                continue
            try:
                self._time.passed(marks)
            except BaseException:
                # A signal's handler has raised here: the rest of these marks is lost.
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
    """A clock for this device, None where it cannot be timed without waiting for it."""
    found = module(device)
    event = getattr(found, "Event", None)
    if not hasattr(found, "current_stream") or not hasattr(event, "elapsed_time"):
        return None
    return DeviceClock(device, module=found, times=times)
