"""Records a process's state, phase and step, and a stream of 64-bit words about its steps."""

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

# How often pending words are flushed to the journal. A flush costs as much as the hooks of three or
# four steps, but a killed rank loses the words since its last flush. State, phase and step are not
# buffered: they are written at once.
_FLUSH_EVERY_NS = 250_000_000
# The longer flush interval, used if flushes take too much of the overhead budget.
_FLUSH_RARELY_NS = 1_000_000_000
# With more pending words than this, flush earlier, to bound the memory.
_MOST_WORDS = 20_000


class DevicePosition(NamedTuple):
    """The current phase and step of a device."""

    phase: int
    step: int | None
    """The last step that the device has finished; None if it has caught up with its host."""


class Phase:
    """A phase that can be entered and left.

    Phases are compared by identity, not by name: two threads may each have entered a phase of the
    same name, and leave it in any order.
    """

    __slots__ = ("base", "code", "expect_ms", "name", "of_hooks", "word")

    def __init__(
        self, name: str, code: int, origin_ns: int, word: int = 0, expect_ms: int = 0
    ) -> None:
        self.name = name
        self.code = code
        self.of_hooks = False  # whether hooks enter and leave it, within one step
        self.expect_ms = expect_ms
        self.word = word  # the number of a name chosen by the user; 0 without one
        # `base + clock()` is the phase word for a phase that begins now: its code in the high byte,
        # and below it the nanoseconds since the journal was created.
        self.base = (code << _SHIFT) - origin_ns


class OpenPhases:
    """The stack of open phases, and the words that wait for a flush.

    Hooks enter and leave phases on the training thread, about ten times per step. Each change is
    written to the journal's phase word immediately.
    """

    __slots__ = ("_bases", "clock", "device_clock", "opened", "origin_ns", "pending", "words")

    def __init__(self, writer: JournalWriter, clock: Callable[[], int] = monotonic_ns) -> None:
        """*clock*: the monotonic clock in nanoseconds, as in `created_monotonic_ns`."""
        self.clock = clock
        self.origin_ns = writer.created_monotonic_ns
        self.words = writer.words
        # The outermost phase: `_bases[False]` in unmeasured steps, `_bases[True]` in measured ones.
        names = ("unmeasured", "other")
        self._bases = [Phase(name, PHASES[name], self.origin_ns) for name in names]
        self.opened = [self._bases[True]]
        self.pending: list[int] = []
        # The `DeviceClock` of the training thread's device, if any. Its `mark` is called at each
        # phase change. It is defined in torch/, which this package does not import.
        self.device_clock: Any = None

    def enter(self, phase: Phase) -> None:
        """Enter a phase, nested in the current one."""
        self.opened.append(phase)
        self._change(phase)

    def leave(self, phase: Phase) -> None:
        """Leave a phase and all phases inside it. A phase that is not open is ignored."""
        opened = self.opened
        if phase in opened:
            del opened[opened.index(phase) :]
            self._change(opened[-1])

    def _change(self, phase: Phase) -> None:
        """From now on, time counts for this phase."""
        self.words[PHASE_WORD] = word = phase.base + self.clock()
        self.pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(word)

    def measure(self, measured: bool) -> None:
        """Set whether steps are measured from now on. If not, their time counts as `unmeasured`."""
        self.opened[0] = self._bases[measured]

    def go_on_measured(self) -> None:
        """Measure from now on, in the middle of an unmeasured step."""
        self.measure(True)
        self._change(self.opened[-1])

    def of_hooks(self, name: str, of_buffers: bool = False) -> Phase:
        """A phase that hooks enter and leave in each step. The same object is used every time."""
        phase = Phase(name, PHASES[name] | (layout.OF_BUFFERS if of_buffers else 0), self.origin_ns)
        phase.of_hooks = True
        return phase

    def now_ns(self) -> int:
        """The time since the journal's creation."""
        return self.clock() - self.origin_ns

    def close(self) -> None:
        """From now on, write phase words to memory outside of the journal, which is about to
        close."""
        self.words = scratch_words()


class DeviceTimes:
    """Collects what the `DeviceClock` measures (times by phase, and step words) for the next
    flush."""

    def __init__(self, phases: OpenPhases) -> None:
        self.phases = phases
        self.by_phase: dict[int, float] = {}
        self.words: list[int] = []
        self.flushed_words = 0

    @property
    def present_words(self) -> memoryview[int]:
        """The journal's fixed words, which include the current phase."""
        return self.phases.words

    def add_device_time(self, code: int, seconds: float) -> None:
        """Add time that the device has spent in a phase."""
        self.by_phase[code] = self.by_phase.get(code, 0.0) + seconds

    def add_device_words(self, words: Sequence[int]) -> None:
        """Add the words of a step that the device has finished."""
        self.words += words

    def flush(self, documents: Documents) -> dict[int, float]:
        """Append the words to the journal's ring. Returns the seconds that the device spent in each
        phase since the last flush."""
        by_phase, self.by_phase = self.by_phase, {}
        # Copy the words first, as hooks may append more during the flush.
        words = self.words[:]
        if words:
            del self.words[: len(words)]
            documents.append_words(layout.DEVICE_STEPS, self.flushed_words, words)
            self.flushed_words += len(words)
        return by_phase


# -- the progress of the process


class Progress:
    """Writes progress to the journal, where the agent can read it after the process has died.

    The current phase is written at each change, and the number of steps at the end of each step.
    Step words (one per phase change, and some at the end of a step) are buffered until the next
    flush, which adds them to the totals and appends them to the ring. Time is attributed to the
    innermost phase only, so that the phases of a step add up to its duration.

    Hooks enter and leave phases on the training thread, about ten times per step. Users may call
    `begin` and `end` in any thread.
    """

    def __init__(self, recorder: Recorder, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.recorder = recorder
        self.phases = OpenPhases(recorder.writer, clock)
        recorder.on_value = self.mark_running
        self.steps = recorder.steps
        self.counted = self.steps.counted = CountedSteps(clock)
        self._add_work: Callable[[], None] = lambda: None
        self.work = self.steps.work
        # Identifier of the training thread; 0 until a step begins.
        self.thread = 0
        self.device_times = DeviceTimes(self.phases)
        self._flushing = self._over = False
        self._deferred: Callable[[], None] | None = None
        self._flushed_words = 0
        self._flush_every_ns = _FLUSH_EVERY_NS
        self._device_timed = True
        # When the next flush is due. The end of each step checks this.
        self.flush_due_ns = 0
        self._account = TimeAccount()
        self._totals = StepTotals(recorder.totals, recorder.writer)
        # Write a phase before the first state: readers do not look at the phase as long as there is
        # no state.
        recorder.writer.phase(PHASES["other"], 0, self.phases.now_ns())
        self._set_state("starting")

    # -- users

    def begin(self, name: str, expect_s: float = 0.0) -> Phase:
        """Enter a phase, nested in the current one; `end` leaves it.

        In a thread other than the training thread, no time is counted for the phase, as the steps
        go on meanwhile. It is then only a span.
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
        """Leave this phase. It need not be the innermost one, if several threads have entered
        phases."""
        with self.recorder.gate.lock:
            opened = self.phases.opened
            was_open = phase in opened
            if was_open:
                self.go_on_uncounted()
            # Keep the list object, as hooks hold references to it, and change its items.
            opened[:] = [each for each in opened if each is not phase]
            if phase.name == "checkpoint":
                totals = self.recorder.totals
                totals.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                totals.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            if was_open:
                self._write_phase()

    def _write_phase(self) -> None:
        """Write the innermost open phase to the journal, and flush."""
        phases, writer = self.phases, self.recorder.writer
        innermost = phases.opened[-1]
        since = phases.clock()
        # A signal handler may interrupt this between any two stores. That does no harm, as each
        # store writes one whole word. The caller's lock keeps other threads from closing the
        # journal meanwhile.
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
        # Without hooks, the step that the user logged last is the current one. Hooks write their
        # own count instead.
        if not self.steps.began:
            self.recorder.writer.step(self.steps.last)

    # -- the state

    def mark_running(self) -> None:
        """Set the state from `starting` to `running`, when the program first does something."""
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
        """If a signal handler has interrupted a flush or a write: put off *act* until that is
        complete, and return True.

        The state is written at once, as the signal handler may end the process before *act* can
        run.
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

    # -- called by hooks, often and on the training thread: these methods must be short

    def begin_steps(self) -> None:
        """The first step begins. From now on, time outside of phases counts too, as `other`."""
        self.steps.begin_step()
        if not self.thread:
            self.thread = threading.get_ident()
        self.phases.pending.append(_BEGAN + self.phases.now_ns())
        self.mark_running()

    def step_finished(
        self, now: int, skipped: bool = False, phase: Phase | None = None, measures: bool = True
    ) -> bool:
        """A step has ended or was skipped. Returns whether a flush is due.

        *phase*: the innermost phase, if the step's end also ends it. *measures*: whether the next
        step is measured.
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
            # Close phases that hooks have entered and not left: that happens if Ctrl-C interrupts a
            # hook, or if several threads train.
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
        """Assign a number to the step that ends, and buffer the words that describe its end."""
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
            # The work is counted in tokens once there are any, before that in samples. When it
            # changes to tokens, `done` may become smaller.
            write(_WORK | max(0, done - work.written))
            work.written = done
        if skipped:
            write(_SKIPPED)
        write(_ENDED + now - phases.origin_ns)

    def count_missed(self, steps: int) -> None:
        """Count *steps* steps that ended before, but were noticed only now. Their time stays part
        of the current step."""
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
        """From the end of a step on, count up to *steps* further steps without measuring them.

        *optimizer*: a weak reference to the optimizer whose calls end the steps. Counting ends at a
        step that takes longer than *longest_ns*. *add_work* is called for each counted step to add
        its work.
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
        """Buffer the words of steps that have been counted but not yet described. Any thread may
        call this."""
        counted = self.counted
        with self.recorder.gate.lock:
            # No end of a step can get lost between these two assignments: CPython runs signal
            # handlers and switches threads only at calls and loops, and this statement has none.
            ends, counted.ends = counted.ends, []
            for now in ends:
                self._add_work()
                self._end_step(now)
                self.phases.pending.append(counted.base + now)
            self._totals.steps += len(ends)

    def go_on_uncounted(self) -> None:
        """Go on without the shortcut that counts steps without measuring them: the next step may
        differ from the previous ones."""
        self.counted.stop()
        self.settle()

    def _time_device(self, word: int, measures: bool) -> None:
        """At the end of a step: start or stop timing on the device, if *measures* has changed.
        *word*: the phase word of this moment."""
        clock = self.phases.device_clock
        if clock is not None and measures is not self._device_timed:
            if measures:
                clock.resume(self.steps.count, word)
            else:
                clock.pause()
        self._device_timed = measures

    def mark_profiled(self) -> None:
        """Mark the current step as profiled, as its duration is not typical."""
        self.phases.pending.append(_PROFILED)

    def device_position(self) -> DevicePosition | None:
        """The phase and step that the device executes, if known. May be called in any thread."""
        clock = self.phases.device_clock
        return None if clock is None else clock.position()

    def another_trains(self) -> bool:
        """Whether the training thread is another thread than this one, and is alive."""
        if self.thread in (0, threading.get_ident()):
            return False
        return any(each.ident == self.thread for each in threading.enumerate())

    # -- flushing

    def flush_rarely(self, rarely: bool) -> None:
        """Use the longer flush interval if *rarely*, else the normal one."""
        self._flush_every_ns = _FLUSH_RARELY_NS if rarely else _FLUSH_EVERY_NS

    def flush_if_due(self) -> None:
        """Flush if a flush is due or many words are pending; works even if no step ever ends."""
        phases = self.phases
        if len(phases.pending) > _MOST_WORDS or phases.clock() >= self.flush_due_ns:
            # A process that only evaluates makes no steps, but it is running too.
            self.mark_running()
            self.flush()
            self.check_agent_if_due()

    def check_agent_if_due(self) -> None:
        """Check every few seconds that the agent is alive. `log` does this too, but a program may
        never call it."""
        now = time.time_ns()
        if now > self.recorder.gate.check_due_ns:
            self.recorder.check_agent(now)

    def flush(self) -> None:
        """Add the pending words to the totals, and append them to the ring."""
        with self.recorder.gate.lock:
            # If a signal handler has interrupted a flush, its words stay pending until the next
            # flush.
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
        # Take only the words that are there now: hooks on the training thread may append more while
        # another thread flushes.
        count = len(pending)
        words = pending[:count]
        del pending[:count]
        totals, account = self._totals, self._account
        totals.took(account.add(words, now - phases.origin_ns))
        by_phase, on_device = account.taken(), self.device_times.flush(recorder.documents)
        # Drop the device's unmeasured time. Instead, the times of measured steps are scaled up to
        # all steps (`more`).
        on_device.pop(_UNMEASURED, None)
        more = account.whole_of_measured
        totals.add_phases(by_phase, {code: each_s * more for code, each_s in on_device.items()})
        totals.count(self.work)
        if self.steps.began and words:
            recorder.documents.append_words(layout.STEPS, self._flushed_words, words)
            self._flushed_words += len(words)
