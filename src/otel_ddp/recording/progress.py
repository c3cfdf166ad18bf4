"""Where this process stands, and where its time goes: state, phase, step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from time import monotonic_ns as _clock
from typing import Protocol

from otel_ddp import catalog
from otel_ddp.journal import layout
from otel_ddp.journal.writer import scratch_words
from otel_ddp.recording.locked_journal import Amount
from otel_ddp.recording.recorder import Recorder

_CODES = catalog.PHASES
_OTHER = _CODES["other"]
_COMM_WAIT = _CODES["comm_wait"]
_SHIFT, _VALUE = layout.CODE_SHIFT, layout.WORD_VALUE
PHASE_WORD, _STEP_WORD = layout.PHASE // 8, layout.STEP // 8
_BEGAN, _ENDED = layout.STEPS_BEGAN << _SHIFT, layout.STEP_ENDED << _SHIFT
_NUMBER, _GC = layout.STEP_NUMBER << _SHIFT, layout.STEP_GC << _SHIFT
_LOGGED = layout.STEP_LOGGED << _SHIFT
_SKIPPED = layout.STEP_SKIPPED << _SHIFT | 1
_RETRIES, _STEP_WORK = layout.STEP_RETRIES << _SHIFT, layout.STEP_WORK << _SHIFT

# Time in a phase of the user's own is told from time outside of any: before the first step, the
# latter is nobody's.
NAMED = 0x40
# How long what happened may wait to be told. A step of a millisecond is too short to tell of each
# by itself; where the process stands is always told at once.
_FLUSH_EVERY_NS = 100_000_000
# More backwards than that without a step of an optimizer: none is to be expected.
_MOST_ACCUMULATED = 64
# A run of very many phases within that time is told earlier: memory must not grow.
_MOST_WORDS = 20_000


# What grows with the steps, in the order in which it is told.
_WORK = (
    *(catalog.TRAINING_SAMPLES, catalog.TRAINING_TOKENS, catalog.TRAINING_MICRO_BATCHES),
    *(catalog.TRAINING_GC_TIME, catalog.OTEL_DDP_HOOK_TIME),
)


def _labels(code: int, clock: str) -> tuple[tuple[str, str], ...]:
    word = next(word for word, number in _CODES.items() if number == code & layout.PHASE_CODE)
    found: tuple[tuple[str, str], ...] = (("phase", word), ("clock", clock))
    if word == "comm_wait":
        found += (("sync", "buffers" if code & layout.OF_BUFFERS else "gradients"),)
    return found


_ALL_CODES = (*_CODES.values(), _OTHER | NAMED, _COMM_WAIT | layout.OF_BUFFERS)
_LABELS = {code: _labels(code, "host") for code in _ALL_CODES}
_DEVICE_LABELS = {code: _labels(code, "device") for code in _ALL_CODES}


class DeviceClock(Protocol):
    """Hears of each phase when it begins, and says later how long the device took for it."""

    def mark(self, code: int) -> None: ...
    def step_finished(self) -> None: ...


class Phase:
    """A phase that may be open. Two of one name are two: threads may leave them in any order."""

    __slots__ = ("base", "code", "expect_ms", "name", "of_hooks", "word")

    def __init__(self, name: str, code: int, origin_ns: int, word: int = 0) -> None:
        self.name = name
        self.code = code
        self.of_hooks = False  # entered and left within one step
        self.expect_ms = 0
        self.word = word  # the number of the user's own name for it
        # Plus the clock it is the journal's word for "in this phase, since now".
        self.base = (code << _SHIFT) - origin_ns


class Progress:
    """Written to the journal at each change: what is read when the process can no longer speak.

    The word for the phase is written at once. The story (one word a change, and some at the end of
    a step) is kept for a tenth of a second at most, then added up into the totals and appended to
    the ring as it is. Time is charged to the innermost phase that is open, and to no other: the
    phases of a step add up to the step.

    `enter` and `leave` are for hooks on the training thread, ten times a step; `begin` and `end`
    for users, from any thread.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        writer = recorder.writer
        self._words = writer.words
        self._origin = writer.created_monotonic_ns
        self._lock = recorder.lock
        self._flushing = False
        self._deferred: Callable[[], None] | None = None
        self._over = False
        self._outside = Phase("other", _OTHER, self._origin)
        self._open: list[Phase] = [self._outside]
        # What happened since it was last told.
        self._pending: list[int] = []
        self._flushed_words = 0
        self._flush_due_ns = 0
        # Where the telling has come to.
        self._code, self._since = _OTHER, 0
        self._counting = False
        self._step_since = 0
        # Work of all steps, raised on the training thread alone; told together with the story.
        self.samples = self.tokens = self.micro_batches = 0
        self.gc_ns = 0
        self.flops = self.hook_s = 0.0
        self.flops_method = ""
        self._flushed_work: tuple[float, ...] = (0,) * 6
        self._gc_written = self._work_written = 0
        self.retries = 0
        self.steps_began = False
        self.in_step = False
        # Whether a model was called in this step: waiting for a batch may be the end of an epoch.
        self.model_called = False
        # How many steps there were, the same on all ranks; and under which number the user logs
        # the last of them, which may be another one and is known to those who log alone.
        self.step_count = self.logged_number = 0
        self.training_thread = 0  # the one that trains
        self._logged = self._logged_before = recorder.step
        recorder.step_from_hooks = self.step_of_values
        # The other clock, where there is one: told of each change on the training thread.
        self.device_clock: DeviceClock | None = None
        self._on_device: dict[int, float] = {}
        # The phase first: nobody reads it before there is a state.
        writer.phase(_OTHER, 0, _clock() - self._origin)
        self._set_state("starting")

    def hook_phase(self, name: str, of_buffers: bool = False) -> Phase:
        """A phase for hooks: made once, entered and left in each step."""
        code = _CODES[name] | (layout.OF_BUFFERS if of_buffers else 0)
        phase = Phase(name, code, self._origin)
        phase.of_hooks = True
        return phase

    # -- users

    def begin(self, name: str, expect_s: float = 0.0) -> Phase:
        """Enter a phase inside the one that is open; what comes back leaves it.

        Of another thread than the one that trains it is a span and no more: the steps go on beside
        it, and none of their time is spent in it.
        """
        if name in _CODES:
            phase = Phase(name, _CODES[name], self._origin)
        else:
            word = self.recorder.text_number(name)
            phase = Phase(name, _OTHER | NAMED, self._origin, word)
        phase.expect_ms = int(expect_s * 1000)
        beside = self._is_beside_training()
        with self._lock:
            if not beside:
                self._open.append(phase)
                self._write_phase()
            if self._state == "starting" and not self._over:
                self._set_state("running")
        return phase

    def end(self, phase: Phase, took_s: float) -> None:
        """Leave a phase, the innermost one unless threads have one each."""
        with self._lock:
            was_open = phase in self._open
            # In place: hooks look at the same list.
            self._open[:] = [each for each in self._open if each is not phase]
            if phase.name == "checkpoint":
                self.recorder.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                self.recorder.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            if was_open:
                self._write_phase()

    def _is_beside_training(self) -> bool:
        """Whether this thread is another one than that which trains, and which is still there."""
        if not self.steps_began or threading.get_ident() == self.training_thread:
            return False
        return any(each.ident == self.training_thread for each in threading.enumerate())

    def mark_running(self, now_ns: int = 0) -> None:
        """The first sign of work."""
        with self._lock:
            if self._state == "starting" and not self._over:
                self._set_state("running")

    def end_run(self, state: str) -> None:
        """The run has ended."""
        with self._lock:
            self.flush()
            self._set_state(state)
            self._over = True
            self._words = scratch_words()

    def defer(self, act: Callable[[], None], state: str) -> bool:
        """Whether this came in the middle of a telling or a writing: then it is done after that.

        The state is shown at once: who has ended the run may end the process as well.
        """
        with self._lock:
            if self._flushing:
                self._deferred = act
            elif not self.recorder.defer(act):
                return False
            self._set_state(state)
            return True

    def _set_state(self, state: str) -> None:
        self._state = state
        self.recorder.state(catalog.STATES[state], time.time_ns() // 1000)

    def _write_phase(self) -> None:
        """Another phase is the innermost one now: write it down, and tell what was."""
        innermost = self._open[-1]
        since = _clock()
        after_ns = since - self._origin
        code, word, expect_ms = innermost.code, innermost.word, innermost.expect_ms
        if not self.recorder.phase(code, word, after_ns, expect_ms):
            return
        self._pending.append(innermost.base + since)
        if self.device_clock is not None and threading.get_ident() == self.training_thread:
            self.device_clock.mark(innermost.code)
        self.flush()

    # -- hooks: what they call is short, for it is felt

    def raw_writer(self) -> tuple[list[Phase], memoryview[int], Callable[[int], None]]:
        """What `enter` writes with, for hooks that write by themselves: a call is felt as well."""
        return self._open, self._words, self._pending.append

    def enter(self, phase: Phase) -> None:
        """Begin a phase inside the one that is open."""
        self._open.append(phase)
        self._words[PHASE_WORD] = word = phase.base + _clock()
        self._pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(phase.code)

    def leave(self, phase: Phase) -> None:
        """End a phase, and whatever was left open inside it; nothing if it is not open."""
        opened = self._open
        if opened[-1] is phase:
            opened.pop()
        elif opened[-2:][0] is phase:
            del opened[-2:]
        elif phase in opened:
            del opened[opened.index(phase) :]
        else:
            return
        around = opened[-1]
        self._words[PHASE_WORD] = word = around.base + _clock()
        self._pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(around.code)

    def begin_step(self) -> None:
        """Hooks have seen work: from here on time outside of any phase is part of a step."""
        self.in_step = True
        self._logged_before = self.recorder.step
        if not self.steps_began:
            recorder = self.recorder
            if recorder.step == recorder.implied_steps:
                # No step was logged yet: what was counted instead gives way to the steps of hooks.
                recorder.step = self._logged = self._logged_before = -1
            self.steps_began = recorder.steps_counted = True
            if not self.training_thread:
                self.training_thread = threading.get_ident()
            self._pending.append(_BEGAN + _clock() - self._origin)
            self.mark_running()

    def next_logged_number(self) -> int:
        """Under which number the user will log the step that ends next."""
        logged = self.recorder.step
        if logged == self._logged:
            return self.logged_number + 1
        # What was logged within a step is said of it, what was logged after one, of that one.
        return logged if self.in_step and logged != self._logged_before else logged + 1

    def step_of_values(self, trains: bool) -> int:
        """To which step a value belongs that is logged now without one."""
        if not self.step_count and self.micro_batches > _MOST_ACCUMULATED:
            # A loop that changes the weights by itself has no other steps than these.
            return self.micro_batches
        if trains and self.model_called:
            return self.next_logged_number()
        logged = self.recorder.step
        return self.logged_number if logged == self._logged else logged

    def resume_from(self, done: int) -> None:
        """So many steps were made before this process began; a number that was logged wins."""
        if not self.step_count and self.recorder.step < 0:
            self.logged_number = done

    def step_finished(self, skipped: bool = False, phase: Phase | None = None) -> bool:
        """The optimizer has done its step, or left it out; whether it is time to tell.

        *phase* is the innermost one, if the step's end is its end as well.
        """
        if not self.steps_began:
            self.begin_step()
        now = _clock()
        story = self._pending
        opened = self._open
        if phase is not None and opened[-1] is phase:
            opened.pop()
        if len(opened) > 1:
            # What Ctrl-C in the middle of a hook leaves open, or threads that train at once.
            opened[:] = [each for each in opened if not each.of_hooks]
        if phase is not None:
            story.append(opened[-1].base + now)
            if self.device_clock is not None:
                self.device_clock.mark(opened[-1].code)
        logged = self.recorder.step
        number = self.logged_number + 1 if logged == self._logged else self.next_logged_number()
        self.logged_number, self._logged = number, logged
        self.step_count += 1
        story.append(_NUMBER | self.step_count)
        if number != self.step_count:
            story.append(_LOGGED | number)
        if self.gc_ns != self._gc_written:
            story.append(_GC | self.gc_ns - self._gc_written)
            self._gc_written = self.gc_ns
        work = self.tokens or self.samples
        if work != self._work_written:
            # Less than before: tokens, of which there were none until now.
            story.append(_STEP_WORK | max(0, work - self._work_written))
            self._work_written = work
        if self.retries:
            story.append(_RETRIES | self.retries)
            self.retries = 0
        if skipped:
            story.append(_SKIPPED)
        story.append(_ENDED + now - self._origin)
        self._words[PHASE_WORD] = word = opened[-1].base + now
        if phase is None:
            story.append(word)
        self._words[_STEP_WORD] = number + 1
        self.in_step = self.model_called = False
        if self.device_clock is not None:
            self.device_clock.step_finished()
        return now >= self._flush_due_ns or len(story) > _MOST_WORDS

    def add_device_time(self, code: int, seconds: float) -> None:
        """The device has spent this long in a phase; told with the rest."""
        self._on_device[code] = self._on_device.get(code, 0.0) + seconds

    # -- telling

    def flush_if_due(self) -> None:
        """Tell if it is time, or if there is much to tell: also where no step ever ends."""
        if len(self._pending) > _MOST_WORDS or _clock() >= self._flush_due_ns:
            # Who only evaluates is at work as well.
            self.mark_running()
            self.flush()

    def flush(self) -> None:
        """Put what happened into the totals and into the ring."""
        with self._lock:
            # A signal handler may come in the middle of this; whatever it did is told next time.
            if self._flushing or self._over:
                return
            self._flushing = True
            try:
                self._flush()
            finally:
                self._flushing = False
                act, self._deferred = self._deferred, None
                if act is not None:
                    act()

    def _flush(self) -> None:
        now = _clock()
        self._flush_due_ns = now + _FLUSH_EVERY_NS
        story = self._pending
        # Hooks may go on writing while another thread is here.
        count = len(story)
        words = story[:count]
        del story[:count]
        charged: dict[int, int] = {}
        durations: list[int] = []
        steps = skipped = leap = 0
        code, since = self._code, self._since
        for word in words:
            kind = word >> _SHIFT
            value = word & _VALUE
            if kind < layout.STEPS_BEGAN:
                if value > since:
                    if code != _OTHER or self._counting:
                        charged[code] = charged.get(code, 0) + value - since
                    since = value
                code = kind
            elif kind == layout.STEP_ENDED:
                if leap:
                    skipped += 1
                else:
                    steps += 1
                    if value > self._step_since:
                        durations.append(value - self._step_since)
                leap, self._step_since = 0, value
            elif kind == layout.STEP_SKIPPED:
                leap = 1
            elif kind == layout.STEPS_BEGAN:
                # Time outside of any phase was nobody's until now.
                if code == _OTHER:
                    since = max(since, value)
                self._counting, self._step_since = True, value
        # What the present phase has taken so far is told as well.
        until = now - self._origin
        if until > since and (code != _OTHER or self._counting):
            charged[code] = charged.get(code, 0) + until - since
        self._code, self._since = code, max(since, until)
        self._raise_totals(charged, durations, steps, skipped)
        if self.steps_began and words:
            self.recorder.append_words(layout.STEPS, self._flushed_words, words)
            self._flushed_words += len(words)

    def _raise_totals(
        self, charged: dict[int, int], durations: list[int], steps: int, skipped: int
    ) -> None:
        amounts: list[Amount] = [
            (catalog.TRAINING_PHASE_TIME, _LABELS[code], nanoseconds / 1e9)
            for code, nanoseconds in charged.items()
        ]
        on_device, self._on_device = self._on_device, {}
        amounts += [
            (catalog.TRAINING_PHASE_TIME, _DEVICE_LABELS[code], seconds)
            for code, seconds in on_device.items()
        ]
        work = (
            *(self.samples, self.tokens, self.micro_batches),
            *(self.gc_ns / 1e9, self.hook_s, self.flops),
        )
        grown = [now - before for now, before in zip(work, self._flushed_work, strict=True)]
        self._flushed_work = work
        for metric, amount in (
            (catalog.TRAINING_STEPS, steps),
            *zip(_WORK, grown[:-1], strict=True),
        ):
            if amount:
                amounts.append((metric, (), float(amount)))
        if grown[-1]:
            method = (("method", self.flops_method),)
            amounts.append((catalog.TRAINING_FLOPS, method, grown[-1]))
        if skipped:
            why = (("reason", "overflow"),)
            amounts.append((catalog.TRAINING_STEPS_SKIPPED, why, float(skipped)))
        if amounts:
            self.recorder.raise_totals(amounts)
        if durations:
            self.recorder.observe_all(
                catalog.TRAINING_STEP_DURATION, [each / 1e9 for each in durations]
            )
            self.recorder.step_duration(durations[-1] / 1e9)
