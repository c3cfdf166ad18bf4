"""The progress of this process: its state, its phase and its step, written at each change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from otel_ddp.journal import layout
from otel_ddp.recording.phases import (
    PHASE_WORD,
    DevicePosition,
    DeviceTimes,
    OpenPhases,
    Phase,
)
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.steps import CountedSteps
from otel_ddp.recording.totals import NAMED, StepTotals, TimeAccount
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES, STATES

_SHIFT = layout.CODE_SHIFT
_UNMEASURED = PHASES["unmeasured"]
_STEP_WORD = layout.STEP // 8
_BEGAN, _ENDED = layout.STEPS_BEGAN << _SHIFT, layout.STEP_ENDED << _SHIFT
_NUMBER, _LOGGED = layout.STEP_NUMBER << _SHIFT, layout.STEP_LOGGED << _SHIFT
_SKIPPED, _WORK = layout.STEP_SKIPPED << _SHIFT | 1, layout.STEP_WORK << _SHIFT
_PROFILED = layout.STEP_PROFILED << _SHIFT | 1

# Steps are flushed this often at most: a flush and what is read beside it take as long as the hooks
# of three or four steps, and a killed rank lacks what was not flushed. The state, the phase and the
# step are written at once.
_FLUSH_EVERY_NS = 250_000_000
# Where a flush takes more than the budget has.
_FLUSH_RARELY_NS = 1_000_000_000
# Very many phases within that time are flushed earlier: memory must not grow.
_MOST_WORDS = 20_000


class Progress:
    """Written to the journal at each change, and read by the agent after the process has died.

    The word for the phase is written at once, and the number of steps as each ends. The words of
    the steps (one for each change, and some at the end of a step) wait for a quarter of a second at
    most. Then they are added up into the totals and appended to the ring as they are. Time counts
    for the innermost open phase only, so the phases of a step add up to the step.

    Hooks enter and leave phases on the training thread, ten times a step. Users call `begin` and
    `end` from any thread.
    """

    def __init__(self, recorder: Recorder, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.recorder = recorder
        self.phases = OpenPhases(recorder.writer, clock)
        recorder.on_value = self.mark_running
        self.steps = recorder.steps
        self.counted = self.steps.counted = CountedSteps(clock)
        self._add_work: Callable[[], None] = lambda: None
        self.work = self.steps.work
        self.thread = 0
        """The thread that trains: that of a function may end at any time. 0: none has."""
        self.device_times = DeviceTimes(self.phases)
        self._flushing = self._over = False
        self._deferred: Callable[[], None] | None = None
        self._flushed_words = 0
        self._flush_every_ns = _FLUSH_EVERY_NS
        self._device_timed = True
        self.flush_due_ns = 0
        """When the words of the steps are to be written; at the end of a step."""
        self._account = TimeAccount()
        self._totals = StepTotals(recorder.totals, recorder.writer)
        # The phase first: it is not read before there is a state.
        recorder.writer.phase(PHASES["other"], 0, self.phases.now_ns())
        self._set_state("starting")

    # -- users

    def begin(self, name: str, expect_s: float = 0.0) -> Phase:
        """Enters a phase inside the open one; `end` leaves it.

        On another thread than the training one it is only a span: the steps go on beside it, and
        none of their time counts for it.
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
        """Leaves a phase. It is the innermost one, unless several threads have opened some."""
        with self.recorder.gate.lock:
            opened = self.phases.opened
            was_open = phase in opened
            if was_open:
                self.go_on_uncounted()
            # In place: hooks use the same list.
            opened[:] = [each for each in opened if each is not phase]
            if phase.name == "checkpoint":
                totals = self.recorder.totals
                totals.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                totals.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            if was_open:
                self._write_phase()

    def _write_phase(self) -> None:
        """Writes the phase that is now the innermost one, and flushes."""
        phases, writer = self.phases, self.recorder.writer
        innermost = phases.opened[-1]
        since = phases.clock()
        # Single words, which a signal handler may interrupt. The lock keeps other threads from
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
        # If the hooks count the steps, they write them too.
        if not self.steps.began:
            self.recorder.writer.step(self.steps.last)

    # -- the state

    def mark_running(self) -> None:
        """Sets the state to running, at the first sign of work."""
        with self.recorder.gate.lock:
            if self._state == "starting" and not self._over:
                self._set_state("running")

    def end_run(self, state: str) -> None:
        """Flushes, and sets the state in which the run has ended."""
        with self.recorder.gate.lock:
            self.go_on_uncounted()
            self.flush()
            self._set_state(state)
            self._over = True
            self.phases.close()
            self._totals.close()
            self.counted.words, self.counted.store = self.phases.words, self._totals.store

    def defer(self, act: Callable[[], None], state: str) -> bool:
        """Whether this call interrupted a flush or a write. If so, the act is done right after it.

        The state is written at once, since the handler that ends the run may end the process too.
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

    # -- hooks: training feels every call here, so they are few and short

    def begin_steps(self) -> None:
        """The first step begins: from here on, time outside of any phase belongs to a step."""
        self.steps.begin_step()
        if not self.thread:
            self.thread = threading.get_ident()
        self.phases.pending.append(_BEGAN + self.phases.now_ns())
        self.mark_running()

    def step_finished(
        self, now: int, skipped: bool = False, phase: Phase | None = None, measures: bool = True
    ) -> bool:
        """The optimizer has done its step, or skipped it; true if a flush is due.

        *phase* is the innermost one, if it ends together with the step. *measures*: whether the
        phases of the next step are measured.
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
            # Phases stay open after Ctrl-C in the middle of a hook, or if threads train at once.
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
        """Writes the words for the end of a step, and numbers it."""
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
            # Less than before: tokens, of which there were none until now.
            write(_WORK | max(0, done - work.written))
            work.written = done
        if skipped:
            write(_SKIPPED)
        write(_ENDED + now - phases.origin_ns)

    def count_missed(self, steps: int) -> None:
        """So many steps before this one were steps, as is known by now: it has their time."""
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
        """A step has ended, and so many that follow are only counted, of this optimizer.

        *optimizer* gives it as long as it is there. They take no longer than that each, and
        *add_work* adds the work of one of them.
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
        """Writes the rest of the steps that were only counted. Any thread may ask for that."""
        counted = self.counted
        with self.recorder.gate.lock:
            # One statement, which no signal's handler and no other thread interrupts.
            ends, counted.ends = counted.ends, []
            for now in ends:
                self._add_work()
                self._end_step(now)
                self.phases.pending.append(counted.base + now)
            self._totals.steps += len(ends)

    def go_on_uncounted(self) -> None:
        """From here on no step is only counted: the next one may be unlike those before it."""
        self.counted.stop()
        self.settle()

    def _time_device(self, word: int, measures: bool) -> None:
        """A step has ended at this word: whether the next one is timed on the device."""
        clock = self.phases.device_clock
        if clock is not None and measures is not self._device_timed:
            if measures:
                clock.resume(self.steps.count, word)
            else:
                clock.pause()
        self._device_timed = measures

    def mark_profiled(self) -> None:
        """The step that ends next is unusual: it is being profiled."""
        self.phases.pending.append(_PROFILED)

    def device_position(self) -> DevicePosition | None:
        """Where the device is, as far as that is known. Any thread may ask."""
        clock = self.phases.device_clock
        return None if clock is None else clock.position()

    def another_trains(self) -> bool:
        """Whether another thread than this one trains, and is still alive."""
        if self.thread in (0, threading.get_ident()):
            return False
        return any(each.ident == self.thread for each in threading.enumerate())

    # -- flushing

    def flush_rarely(self, rarely: bool) -> None:
        """How often the words of the steps are written from now on."""
        self._flush_every_ns = _FLUSH_RARELY_NS if rarely else _FLUSH_EVERY_NS

    def flush_if_due(self) -> None:
        """Flushes if that is due or much is pending, also if no step ever ends."""
        phases = self.phases
        if len(phases.pending) > _MOST_WORDS or phases.clock() >= self.flush_due_ns:
            # A process that only evaluates is running, too.
            self.mark_running()
            self.flush()
            self.check_agent_if_due()

    def check_agent_if_due(self) -> None:
        """As calls of `log` do, every few seconds: a program may never make one."""
        now = time.time_ns()
        if now > self.recorder.gate.check_due_ns:
            self.recorder.check_agent(now)

    def flush(self) -> None:
        """Adds the pending words to the totals, and appends them to the ring."""
        with self.recorder.gate.lock:
            # A signal handler may interrupt this; its words are flushed the next time.
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
        # Hooks may go on writing while another thread is here.
        count = len(pending)
        words = pending[:count]
        del pending[:count]
        totals, account = self._totals, self._account
        totals.took(account.add(words, now - phases.origin_ns))
        by_phase, on_device = account.taken(), self.device_times.flush(recorder.documents)
        # The device's clock knows no phases of steps that are not measured either.
        on_device.pop(_UNMEASURED, None)
        more = account.whole_of_measured
        totals.were_in(by_phase, {code: each_s * more for code, each_s in on_device.items()})
        totals.count(self.work)
        if self.steps.began and words:
            recorder.documents.append_words(layout.STEPS, self._flushed_words, words)
            self._flushed_words += len(words)
