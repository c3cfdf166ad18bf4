"""The progress of the process: its state, phase and step, and the words of its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter, scratch_words
from otel_ddp.recording.documents import Documents
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.steps import CountedSteps
from otel_ddp.recording.totals import NAMED, StepTotals, TimeAccount
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES, STATES

_SHIFT = layout.CODE_SHIFT
_UNMEASURED = PHASES["unmeasured"]
PHASE_WORD, _STEP_WORD = layout.PHASE // 8, layout.STEP // 8
_BEGAN, _ENDED = layout.STEPS_BEGAN << _SHIFT, layout.STEP_ENDED << _SHIFT
_NUMBER, _LOGGED = layout.STEP_NUMBER << _SHIFT, layout.STEP_LOGGED << _SHIFT
_SKIPPED, _WORK = layout.STEP_SKIPPED << _SHIFT | 1, layout.STEP_WORK << _SHIFT
_PROFILED = layout.STEP_PROFILED << _SHIFT | 1

# Flush interval: a flush with its readings takes as long as the hooks of three or four steps, and a
# killed rank lacks what was not flushed. State, phase and step are written immediately.
_FLUSH_EVERY_NS = 250_000_000
# If flushes take too much of the budget.
_FLUSH_RARELY_NS = 1_000_000_000
# Flush earlier after very many phases, to bound the memory.
_MOST_WORDS = 20_000


class DevicePosition(NamedTuple):
    """The current phase and step of a device."""

    phase: int
    step: int | None
    """The last step that the device has finished; None if it has caught up with its host."""


class Phase:
    """A phase that may be open. Two phases of one name are distinct: threads may leave them in any
    order."""

    __slots__ = ("base", "code", "expect_ms", "name", "of_hooks", "word")

    def __init__(
        self, name: str, code: int, origin_ns: int, word: int = 0, expect_ms: int = 0
    ) -> None:
        self.name = name
        self.code = code
        self.of_hooks = False  # entered and left within one step
        self.expect_ms = expect_ms
        self.word = word  # the number of the user's own name for it
        # Adding the clock gives the journal's word for "in this phase since now".
        self.base = (code << _SHIFT) - origin_ns


class OpenPhases:
    """The open phases, the word of the innermost one, and the words that wait for a flush.

    Hooks enter and leave phases on the training thread, ten times a step. The word is written
    immediately.
    """

    __slots__ = ("_bases", "clock", "device_clock", "opened", "origin_ns", "pending", "words")

    def __init__(self, writer: JournalWriter, clock: Callable[[], int] = monotonic_ns) -> None:
        """*clock*: in nanoseconds, like the journal's creation time."""
        self.clock = clock
        self.origin_ns = writer.created_monotonic_ns
        self.words = writer.words
        # The outermost phase, of unmeasured and of measured steps.
        names = ("unmeasured", "other")
        self._bases = [Phase(name, PHASES[name], self.origin_ns) for name in names]
        self.opened = [self._bases[True]]
        self.pending: list[int] = []
        # Gets each change on the training thread. It is a `DeviceClock` of torch/, which this
        # package does not import.
        self.device_clock: Any = None

    def enter(self, phase: Phase) -> None:
        """Enter a phase inside the open one."""
        self.opened.append(phase)
        self._change(phase)

    def leave(self, phase: Phase) -> None:
        """Leave a phase and all phases inside it; do nothing if it is not open."""
        opened = self.opened
        if phase in opened:
            del opened[opened.index(phase) :]
            self._change(opened[-1])

    def _change(self, phase: Phase) -> None:
        """Time counts for this phase from now on."""
        self.words[PHASE_WORD] = word = phase.base + self.clock()
        self.pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(word)

    def measure(self, measured: bool) -> None:
        """Set whether the following phases are measured."""
        self.opened[0] = self._bases[measured]

    def go_on_measured(self) -> None:
        """Measure the rest of the current step."""
        self.measure(True)
        self._change(self.opened[-1])

    def of_hooks(self, name: str, of_buffers: bool = False) -> Phase:
        """A reusable phase, which hooks enter and leave in each step."""
        phase = Phase(name, PHASES[name] | (layout.OF_BUFFERS if of_buffers else 0), self.origin_ns)
        phase.of_hooks = True
        return phase

    def now_ns(self) -> int:
        """The time since the journal's creation."""
        return self.clock() - self.origin_ns

    def close(self) -> None:
        """The journal is about to close: later words are discarded."""
        self.words = scratch_words()


class DeviceTimes:
    """The results of the device's clock, until the next flush."""

    def __init__(self, phases: OpenPhases) -> None:
        self.phases = phases
        self.by_phase: dict[int, float] = {}
        self.words: list[int] = []
        self.flushed_words = 0

    @property
    def present_words(self) -> memoryview[int]:
        """The journal's words, with the current phase."""
        return self.phases.words

    def add_device_time(self, code: int, seconds: float) -> None:
        """Add time that the device has spent in a phase."""
        self.by_phase[code] = self.by_phase.get(code, 0.0) + seconds

    def add_device_words(self, words: Sequence[int]) -> None:
        """Add the words of a step that the device has finished."""
        self.words += words

    def flush(self, documents: Documents) -> dict[int, float]:
        """Append the words to the ring; returns the time by phase since the last call."""
        by_phase, self.by_phase = self.by_phase, {}
        # Hooks may append meanwhile.
        words = self.words[:]
        if words:
            del self.words[: len(words)]
            documents.append_words(layout.DEVICE_STEPS, self.flushed_words, words)
            self.flushed_words += len(words)
        return by_phase


# -- the progress of the process


class Progress:
    """Writes each change to the journal, where the agent can read it after the process has died.

    The word of the phase is written immediately, and the number of steps at the end of each. The
    words of steps (one per change, and some at the end of a step) wait for at most a quarter of a
    second. Then they are added to the totals, and appended to the ring. Time counts for the
    innermost phase only, so that the phases of a step add up to its duration.

    Hooks enter and leave phases on the training thread, ten times a step. Users call `begin` and
    `end` in any thread.
    """

    def __init__(self, recorder: Recorder, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.recorder = recorder
        self.phases = OpenPhases(recorder.writer, clock)
        recorder.on_value = self.mark_running
        self.steps = recorder.steps
        self.counted = self.steps.counted = CountedSteps(clock)
        self._add_work: Callable[[], None] = lambda: None
        self.work = self.steps.work
        # The training thread; 0: none yet. A phase opened in another thread does not count.
        self.thread = 0
        self.device_times = DeviceTimes(self.phases)
        self._flushing = self._over = False
        self._deferred: Callable[[], None] | None = None
        self._flushed_words = 0
        self._flush_every_ns = _FLUSH_EVERY_NS
        self._device_timed = True
        # When the words of steps are to be flushed, at the end of a step.
        self.flush_due_ns = 0
        self._account = TimeAccount()
        self._totals = StepTotals(recorder.totals, recorder.writer)
        # The phase first: readers check the state before they read it.
        recorder.writer.phase(PHASES["other"], 0, self.phases.now_ns())
        self._set_state("starting")

    # -- users

    def begin(self, name: str, expect_s: float = 0.0) -> Phase:
        """Enter a phase inside the open one; `end` leaves it.

        Beside the training thread it is only a span: steps go on meanwhile, and no time counts for
        it.
        """
        code, word = PHASES.get(name), 0
        if code is None:
            code, word = PHASES["other"] | NAMED, self.recorder.names.of_text(name)
        phase = Phase(name, code, self.phases.origin_ns, word, int(expect_s * 1000))
        beside = self.steps.began and self.another_trains()
        with self.recorder.gate.lock:
            if not beside:
                self.go_on_uncounted()
                self.phases.opened.append(phase)
                self._write_phase()
            self.mark_running()
        return phase

    def end(self, phase: Phase, took_s: float) -> None:
        """Leave a phase: the innermost one, unless several threads have opened phases."""
        with self.recorder.gate.lock:
            opened = self.phases.opened
            was_open = phase in opened
            if was_open:
                self.go_on_uncounted()
            # In place, as hooks hold this list.
            opened[:] = [each for each in opened if each is not phase]
            if phase.name == "checkpoint":
                totals = self.recorder.totals
                totals.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                totals.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            if was_open:
                self._write_phase()

    def _write_phase(self) -> None:
        """Write the innermost phase, and flush."""
        phases, writer = self.phases, self.recorder.writer
        innermost = phases.opened[-1]
        since = phases.clock()
        # Single words, so a signal handler may interrupt this. The lock keeps other threads from
        # closing the journal meanwhile.
        if self.recorder.gate.closed:
            return
        self._write_logged_step()
        writer.expect_ms(innermost.expect_ms)
        writer.phase(innermost.code, innermost.word, since - phases.origin_ns)
        changed = innermost.base + since
        phases.pending.append(changed)
        if phases.device_clock is not None and threading.get_ident() == self.thread:
            phases.device_clock.mark(changed)
        self.flush()

    def _write_logged_step(self) -> None:
        # If hooks count steps, they also write them.
        if not self.steps.began:
            self.recorder.writer.step(self.steps.last)

    # -- the state

    def mark_running(self) -> None:
        """Set the state to running, at the first activity."""
        with self.recorder.gate.lock:
            if self._state == "starting" and not self._over:
                self._set_state("running")

    def end_run(self, state: str) -> None:
        """Flush, and set the final state."""
        with self.recorder.gate.lock:
            self.go_on_uncounted()
            self.flush()
            self._set_state(state)
            self._over = True
            self.phases.close()
            self._totals.close()
            self.counted.words, self.counted.store = self.phases.words, self._totals.store

    def defer(self, act: Callable[[], None], state: str) -> bool:
        """Whether this call interrupts a flush or a write; if so, *act* runs right after that.

        The state is written immediately, as the signal handler that ends the run may end the
        process.
        """
        with self.recorder.gate.lock:
            if self._flushing:
                self._deferred = act
            elif not self.recorder.gate.defer(act):
                return False
            self._set_state(state)
            return True

    def _set_state(self, state: str) -> None:
        self._state = state
        with self.recorder.gate.lock:
            if not self.recorder.gate.closed:
                self._write_logged_step()
                self.recorder.writer.state(STATES[state], time.time_ns() // 1000)

    # -- hooks: called often in the training thread, so few and short

    def begin_steps(self) -> None:
        """The first step begins: from now on, time outside of phases belongs to a step."""
        self.steps.begin_step()
        if not self.thread:
            self.thread = threading.get_ident()
        self.phases.pending.append(_BEGAN + self.phases.now_ns())
        self.mark_running()

    def step_finished(
        self, now: int, skipped: bool = False, phase: Phase | None = None, measures: bool = True
    ) -> bool:
        """A step ends or was skipped; returns whether a flush is due.

        *phase*: the innermost phase, if it ends together with the step. *measures*: whether the
        next step is measured.
        """
        steps, phases = self.steps, self.phases
        if not steps.began:
            self.begin_steps()
        phases.measure(measures)
        pending, opened = phases.pending, phases.opened
        self.work.write_stops(pending)
        if phase is not None and opened[-1] is phase:
            opened.pop()
        if len(opened) > 1:
            # Phases stay open after Ctrl-C in a hook, or if several threads train.
            opened[:] = [each for each in opened if not each.of_hooks]
        word = opened[-1].base + now
        if phase is not None:
            pending.append(word)
        self._end_step(now, skipped)
        phases.words[PHASE_WORD] = word
        phases.words[_STEP_WORD] = steps.logged_number + 1
        if skipped:
            self.recorder.totals.count(catalog.TRAINING_STEPS_SKIPPED, reason="overflow")
        else:
            self._totals.step_ended()
        if phases.device_clock is not None:
            phases.device_clock.mark(word)
            phases.device_clock.step_finished(steps.count, now - phases.origin_ns)
        self._time_device(word, measures)
        if phase is None:
            pending.append(word)
        return now >= self.flush_due_ns or len(pending) > _MOST_WORDS

    def _end_step(self, now: int, skipped: bool = False) -> None:
        """Write the words of a step's end, and number the step."""
        steps, work, phases = self.steps, self.work, self.phases
        write = phases.pending.append
        logged = steps.last
        same = logged == steps.logged_before
        number = steps.logged_number + 1 if same else steps.next_logged()
        steps.logged_number, steps.logged_before = number, logged
        steps.count += 1
        steps.in_step = steps.model_called = False
        write(_NUMBER | steps.count)
        if number != steps.count or logged != steps.before_first:
            write(_LOGGED | number)
        done = work.tokens or work.samples
        if done != work.written:
            # It is smaller if the first tokens came after samples.
            write(_WORK | max(0, done - work.written))
            work.written = done
        if skipped:
            write(_SKIPPED)
        write(_ENDED + now - phases.origin_ns)

    def count_missed(self, steps: int) -> None:
        """So many earlier steps turn out to be steps: their time counts for this one."""
        self.steps.count += steps
        self.steps.logged_number += steps
        self._totals.steps += steps

    def count_steps(
        self,
        steps: int,
        optimizer: Callable[[], Any],
        longest_ns: int,
        add_work: Callable[[], None],
    ) -> None:
        """A step has ended; only count the next ones, up to *steps*, of this optimizer.

        *optimizer*: returns it while it is alive. A counted step takes at most *longest_ns*, and
        *add_work* adds its work.
        """
        counted, totals = self.counted, self._totals
        if totals.place < 0:
            return
        self._add_work = add_work
        counted.base, counted.step = self.phases.opened[-1].base, self.steps.logged_number + 1
        counted.place, counted.total = totals.place, totals.steps
        counted.words, counted.store = self.phases.words, totals.store
        counted.begin(steps, optimizer, longest_ns)

    def settle(self) -> None:
        """Write the rest of the words of counted steps. May be called in any thread."""
        counted = self.counted
        with self.recorder.gate.lock:
            # A single statement, which no signal handler or thread interrupts.
            ends, counted.ends = counted.ends, []
            for now in ends:
                self._add_work()
                self._end_step(now)
                self.phases.pending.append(counted.base + now)
            self._totals.steps += len(ends)

    def go_on_uncounted(self) -> None:
        """Stop counting: the next step may be unlike those before it."""
        self.counted.stop()
        self.settle()

    def _time_device(self, word: int, measures: bool) -> None:
        """A step ends at this word: start or stop timing on the device."""
        clock = self.phases.device_clock
        if clock is not None and measures is not self._device_timed:
            if measures:
                clock.resume(self.steps.count, word)
            else:
                clock.pause()
        self._device_timed = measures

    def mark_profiled(self) -> None:
        """Mark the current step as profiled, and so as unusual."""
        self.phases.pending.append(_PROFILED)

    def device_position(self) -> DevicePosition | None:
        """Where the device is, if known. May be called in any thread."""
        clock = self.phases.device_clock
        return None if clock is None else clock.position()

    def another_trains(self) -> bool:
        """Whether another thread trains and is alive."""
        if self.thread in (0, threading.get_ident()):
            return False
        return any(each.ident == self.thread for each in threading.enumerate())

    # -- flushing

    def flush_rarely(self, rarely: bool) -> None:
        """Choose how often words are flushed from now on."""
        self._flush_every_ns = _FLUSH_RARELY_NS if rarely else _FLUSH_EVERY_NS

    def flush_if_due(self) -> None:
        """Flush if it is due or much is pending, also if no step ever ends."""
        phases = self.phases
        if len(phases.pending) > _MOST_WORDS or phases.clock() >= self.flush_due_ns:
            # A process that only evaluates is running, too.
            self.mark_running()
            self.flush()
            self.check_agent_if_due()

    def check_agent_if_due(self) -> None:
        """Check the agent every few seconds, as `log` does: a program may never log."""
        now = time.time_ns()
        if now > self.recorder.gate.check_due_ns:
            self.recorder.check_agent(now)

    def flush(self) -> None:
        """Add the pending words to the totals, and append them to the ring."""
        with self.recorder.gate.lock:
            # If a signal handler interrupts a flush, its words wait for the next one.
            if self._flushing or self._over or self.recorder.gate.closed:
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
        phases, recorder = self.phases, self.recorder
        self.settle()
        now = phases.clock()
        self.flush_due_ns = now + self._flush_every_ns
        pending = phases.pending
        # Hooks may append while another thread flushes.
        count = len(pending)
        words = pending[:count]
        del pending[:count]
        totals, account = self._totals, self._account
        totals.took(account.add(words, now - phases.origin_ns))
        by_phase, on_device = account.taken(), self.device_times.flush(recorder.documents)
        # The device's clock does not divide unmeasured steps into phases.
        on_device.pop(_UNMEASURED, None)
        more = account.whole_of_measured
        totals.were_in(by_phase, {code: each_s * more for code, each_s in on_device.items()})
        totals.count(self.work)
        if self.steps.began and words:
            recorder.documents.append_words(layout.STEPS, self._flushed_words, words)
            self._flushed_words += len(words)
