"""The progress of this process: its state, its phase and its step, written at each change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns as _clock
from time import time_ns
from typing import NamedTuple, Protocol

from otel_ddp import catalog
from otel_ddp.journal import layout, trace_ids
from otel_ddp.journal.writer import scratch_words
from otel_ddp.recording import thread_end
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.step_totals import StepTotals
from otel_ddp.recording.time_account import NAMED, TimeAccount
from otel_ddp.words import PHASES, STATES

_CODES = PHASES
_OTHER = _CODES["other"]
_SHIFT = layout.CODE_SHIFT
PHASE_WORD, _STEP_WORD = layout.PHASE // 8, layout.STEP // 8
_BEGAN, _ENDED = layout.STEPS_BEGAN << _SHIFT, layout.STEP_ENDED << _SHIFT
_NUMBER, _GC = layout.STEP_NUMBER << _SHIFT, layout.STEP_GC << _SHIFT
_LOGGED = layout.STEP_LOGGED << _SHIFT
_SKIPPED = layout.STEP_SKIPPED << _SHIFT | 1
_PROFILED = layout.STEP_PROFILED << _SHIFT | 1
_RETRIES, _STEP_WORK = layout.STEP_RETRIES << _SHIFT, layout.STEP_WORK << _SHIFT

# Steps are flushed this often at most: a step of a millisecond is too short to flush each one.
# The state, the phase and the step are written at once.
_FLUSH_EVERY_NS = 100_000_000
# After this many backwards without a step of an optimizer, none is expected.
_MOST_ACCUMULATED = 64
# A program may train in a thread for each epoch, and there is not room for any number of facts.
_MOST_RETURNS = 20
# Very many phases within that time are flushed earlier: memory must not grow.
_MOST_WORDS = 20_000


class DevicePosition(NamedTuple):
    """Where a device is in the training."""

    phase: int
    """Its code."""
    step: int | None
    """The number of the last step that it has done; None where that is the same as its host's."""


class DeviceClock(Protocol):
    """Gets each phase when it begins, and says later how long the device took for it."""

    def mark(self, word: int) -> None: ...
    def step_finished(self, number: int, now_ns: int) -> None: ...
    def position(self) -> DevicePosition | None: ...


class Phase:
    """A phase that may be open. Two of one name are two: threads leave them in any order."""

    __slots__ = ("base", "code", "expect_ms", "name", "of_hooks", "word")

    def __init__(self, name: str, code: int, origin_ns: int, word: int = 0) -> None:
        self.name = name
        self.code = code
        self.of_hooks = False  # entered and left within one step
        self.expect_ms = 0
        self.word = word  # the number of the user's own name for it
        # Plus the clock, this is the journal's word for "in this phase since now".
        self.base = (code << _SHIFT) - origin_ns


class Progress:
    """Written to the journal at each change, and read by the agent after the process has died.

    The word for the phase is written at once, and what is counted as each step ends. The words of
    the steps (one for each change, and some at the end of a step) wait for a tenth of a second at
    most. Then they are added up into the times by phase and appended to the ring as they are. Time
    counts for the innermost open phase only, so the phases of a step add up to the step.

    Hooks call `enter` and `leave` on the training thread, ten times a step. Users call `begin` and
    `end` from any thread.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        writer = recorder.writer
        self.present_words = writer.words
        self._origin = writer.created_monotonic_ns
        self._lock = recorder.lock
        self._flushing = False
        self._deferred: Callable[[], None] | None = None
        self._over = False
        self._outside = Phase("other", _OTHER, self._origin)
        self._open: list[Phase] = [self._outside]
        # The words since the last flush.
        self._pending: list[int] = []
        self._flushed_words = 0
        self._flush_due_ns = 0
        self._account = TimeAccount()
        self._totals = StepTotals(recorder)
        self._step_began_ns = 0
        self._took_ns = 0  # The last step that was not skipped.
        # Work of all steps, raised on the training thread alone and counted as each step ends.
        self.samples = self.tokens = self.micro_batches = 0
        self.gc_ns = 0
        self.flops = self.hook_s = 0.0
        self.flops_method = ""
        self._gc_written = self._work_written = 0
        self.retries = 0
        self.steps_began = False
        self.in_step = False
        # Whether a model was called in this step: waiting for a batch may be the end of an epoch.
        self.model_called = False
        # The number of steps is the same on all ranks. The number under which the user logs the
        # last one may differ, and only ranks that log know it.
        self.step_count = self.logged_number = 0
        self.training_thread = 0  # The one that trains.
        # Whether that one has ended between two steps, and how often one has.
        self._returned = False
        self._returns = 0
        self._logged = self._logged_before = recorder.step
        recorder.step_from_hooks = self.step_of_values
        # The device's clock, if there is one, gets each change on the training thread.
        self.device_clock: DeviceClock | None = None
        self._on_device: dict[int, float] = {}
        self._device_words: list[int] = []
        self._flushed_device_words = 0
        # The phase first: it is not read before there is a state.
        writer.phase(_OTHER, 0, _clock() - self._origin)
        self._set_state("starting")

    def hook_phase(self, name: str, of_buffers: bool = False) -> Phase:
        """A phase for hooks, made once, which they enter and leave in each step."""
        code = _CODES[name] | (layout.OF_BUFFERS if of_buffers else 0)
        phase = Phase(name, code, self._origin)
        phase.of_hooks = True
        return phase

    # -- users

    def begin(self, name: str, expect_s: float = 0.0) -> Phase:
        """Enters a phase inside the open one; `end` leaves it.

        On another thread than the training one it is only a span: the steps go on beside it, and
        none of their time counts for it.
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
        """Leaves a phase. It is the innermost one, unless several threads have opened some."""
        with self._lock:
            was_open = phase in self._open
            # In place: hooks use the same list.
            self._open[:] = [each for each in self._open if each is not phase]
            if phase.name == "checkpoint":
                self.recorder.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                self.recorder.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            if was_open:
                self._write_phase()

    def _is_beside_training(self) -> bool:
        """Whether another thread trains, and is still alive."""
        if not self.steps_began or threading.get_ident() == self.training_thread:
            return False
        return any(each.ident == self.training_thread for each in threading.enumerate())

    def mark_running(self, now_ns: int = 0) -> None:
        """Sets the state to running, at the first sign of work."""
        with self._lock:
            if self._state == "starting" and not self._over:
                self._set_state("running")

    def end_run(self, state: str) -> None:
        """Flushes, and sets the state in which the run has ended."""
        with self._lock:
            self.flush()
            self._set_state(state)
            self._over = True
            self.present_words = scratch_words()
            self._totals.close()

    def defer(self, act: Callable[[], None], state: str) -> bool:
        """Whether this call interrupted a flush or a write. If so, the act is done right after it.

        The state is written at once, since the handler that ends the run may end the process too.
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
        self.recorder.state(STATES[state], time.time_ns() // 1000)

    def _write_phase(self) -> None:
        """Writes the phase that is now the innermost one, and flushes."""
        innermost = self._open[-1]
        since = _clock()
        after_ns = since - self._origin
        code, word, expect_ms = innermost.code, innermost.word, innermost.expect_ms
        if not self.recorder.phase(code, word, after_ns, expect_ms):
            return
        changed = innermost.base + since
        self._pending.append(changed)
        if self.device_clock is not None and threading.get_ident() == self.training_thread:
            self.device_clock.mark(changed)
        self.flush()

    # -- hooks: training feels every call here, so they are few and short

    def raw_writer(self) -> tuple[list[Phase], memoryview[int], Callable[[int], None]]:
        """What `enter` writes with, for hooks that save its call and write by themselves."""
        return self._open, self.present_words, self._pending.append

    def enter(self, phase: Phase) -> None:
        """Enters a phase inside the open one."""
        self._open.append(phase)
        self.present_words[PHASE_WORD] = word = phase.base + _clock()
        self._pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(word)

    def leave(self, phase: Phase) -> None:
        """Leaves a phase and all that is open inside it; does nothing if the phase is not open."""
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
        self.present_words[PHASE_WORD] = word = around.base + _clock()
        self._pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(word)

    def begin_step(self) -> None:
        """Hooks have seen work: from here on, time outside of any phase belongs to a step."""
        self.in_step = True
        self._logged_before = self.recorder.step
        if not self.steps_began:
            recorder = self.recorder
            if recorder.step == recorder.implied_steps:
                # No step was logged yet: the steps of the hooks replace the counted calls.
                recorder.step = self._logged = self._logged_before = -1
            self.steps_began = recorder.steps_counted = True
            if not self.training_thread:
                self.train_in(threading.get_ident())
            self._step_began_ns = now = _clock()
            self._pending.append(_BEGAN + now - self._origin)
            self.mark_running()

    def train_in(self, thread: int) -> None:
        """From here on this thread trains, the present one."""
        self.training_thread = thread
        if self._returned:
            self._returned = False
            self.recorder.facts({"returned": False})
        thread_end.tell(partial(self._thread_ended, thread))

    def _thread_ended(self, thread: int) -> None:
        # Its process may be killed at any moment.
        self.flush()
        # In the middle of a step, it has not returned but raised.
        between_steps = len(self._open) == 1 and not self.model_called
        if thread == self.training_thread and between_steps and self._returns < _MOST_RETURNS:
            self._returns += 1
            self._returned = True
            self.recorder.facts({"returned": True})

    def next_logged_number(self) -> int:
        """The number under which the user will log the step that ends next."""
        logged = self.recorder.step
        if logged == self._logged:
            return self.logged_number + 1
        # A value logged within a step belongs to it; a value logged after a step belongs to that.
        return logged if self.in_step and logged != self._logged_before else logged + 1

    def trace_and_step(self) -> tuple[str, int | None]:
        """The trace and the step of what happens now; empty before the first one.

        Between two steps it is the step that has ended, as for values: people save and evaluate
        after a step. Its time belongs to the step that follows, so the trace is that one's.
        """
        if self.steps_began:
            # The hooks count alike on all ranks; which ranks log does not matter.
            return trace_ids.trace_of_step(self.step_count + 1), self.step_of_values(True)
        logged = self.recorder.step
        return (trace_ids.trace_of_step(logged), logged) if logged >= 0 else ("", None)

    def step_of_values(self, trains: bool) -> int:
        """The step of a value that is logged now without a step."""
        if not self.step_count and self.micro_batches > _MOST_ACCUMULATED:
            # A loop that changes the weights by itself has only these steps.
            return self.micro_batches
        if trains and self.model_called:
            return self.next_logged_number()
        logged = self.recorder.step
        return self.logged_number if logged == self._logged else logged

    def resume_from(self, done: int) -> None:
        """Counts on from the steps before this process; a logged number takes precedence."""
        if not self.step_count and self.recorder.step < 0:
            self.logged_number = done

    def step_finished(self, skipped: bool = False, phase: Phase | None = None) -> bool:
        """The optimizer has done its step, or skipped it; true if a flush is due.

        *phase* is the innermost one, if it ends together with the step.
        """
        if not self.steps_began:
            self.begin_step()
        now = _clock()
        pending = self._pending
        opened = self._open
        if phase is not None and opened[-1] is phase:
            opened.pop()
        if len(opened) > 1:
            # Phases stay open after Ctrl-C in the middle of a hook, or if threads train at once.
            opened[:] = [each for each in opened if not each.of_hooks]
        if phase is not None:
            pending.append(opened[-1].base + now)
        logged = self.recorder.step
        number = self.logged_number + 1 if logged == self._logged else self.next_logged_number()
        self.logged_number, self._logged = number, logged
        self.step_count += 1
        pending.append(_NUMBER | self.step_count)
        if number != self.step_count:
            pending.append(_LOGGED | number)
        if self.gc_ns != self._gc_written:
            pending.append(_GC | self.gc_ns - self._gc_written)
            self._gc_written = self.gc_ns
        work = self.tokens or self.samples
        if work != self._work_written:
            # Less than before: tokens, of which there were none until now.
            pending.append(_STEP_WORK | max(0, work - self._work_written))
            self._work_written = work
        if self.retries:
            pending.append(_RETRIES | self.retries)
            self.retries = 0
        if skipped:
            pending.append(_SKIPPED)
            self.recorder.count(catalog.TRAINING_STEPS_SKIPPED, reason="overflow")
        else:
            self._took_ns = now - self._step_began_ns
            self._totals.step_ended(self._took_ns)
        self._step_began_ns = now
        self._count_work()
        pending.append(_ENDED + now - self._origin)
        self.present_words[PHASE_WORD] = word = opened[-1].base + now
        if phase is None:
            pending.append(word)
        self.present_words[_STEP_WORD] = number + 1
        self.in_step = self.model_called = False
        if self.device_clock is not None:
            self.device_clock.mark(word)
            self.device_clock.step_finished(self.step_count, now - self._origin)
        return now >= self._flush_due_ns or len(pending) > _MOST_WORDS

    def _count_work(self) -> None:
        work = self.samples, self.tokens, self.micro_batches
        self._totals.count(work, self.flops, self.flops_method)

    def mark_profiled(self) -> None:
        """The step that ends next is unusual: it is being profiled."""
        self._pending.append(_PROFILED)

    def add_device_time(self, code: int, seconds: float) -> None:
        """Adds time that the device has spent in a phase; flushed with the rest."""
        self._on_device[code] = self._on_device.get(code, 0.0) + seconds

    def add_device_words(self, words: Sequence[int]) -> None:
        """Adds the words of a step that the device has finished; flushed with the rest."""
        self._device_words += words

    def device_position(self) -> DevicePosition | None:
        """Where the device is, as far as that is known. Any thread may ask."""
        clock = self.device_clock
        return None if clock is None else clock.position()

    # -- flushing

    def flush_if_due(self) -> None:
        """Flushes if that is due or much is pending, also if no step ever ends."""
        if len(self._pending) > _MOST_WORDS or _clock() >= self._flush_due_ns:
            # A process that only evaluates is running, too.
            self.mark_running()
            self.flush()
            self.check_agent_if_due()

    def check_agent_if_due(self) -> None:
        """As calls of `log` do, every few seconds: a program may never make one."""
        now = time_ns()
        if now > self.recorder.check_due_ns:
            self.recorder.check_agent(now)

    def flush(self) -> None:
        """Adds the pending words to the totals, and appends them to the ring."""
        with self._lock:
            # A signal handler may interrupt this; its words are flushed the next time.
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
        pending = self._pending
        # Hooks may go on writing while another thread is here.
        count = len(pending)
        words = pending[:count]
        del pending[:count]
        self._account.add(words, now - self._origin)
        on_device, self._on_device = self._on_device, {}
        recorder = self.recorder
        if amounts := self._account.amounts(on_device, self.gc_ns / 1e9, self.hook_s):
            recorder.raise_totals(amounts)
        # Of a process that evaluates, or has begun a step.
        self._count_work()
        if self._took_ns > 0:
            recorder.step_duration(self._took_ns / 1e9)
        if self.steps_began and words:
            recorder.append_words(layout.STEPS, self._flushed_words, words)
            self._flushed_words += len(words)
        # Hooks may go on here, too.
        on_device_words = self._device_words[:]
        if on_device_words:
            del self._device_words[: len(on_device_words)]
            before = self._flushed_device_words
            recorder.append_words(layout.DEVICE_STEPS, before, on_device_words)
            self._flushed_device_words += len(on_device_words)
