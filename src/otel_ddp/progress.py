"""Where this process stands, and where its time goes: state, phase, step."""

from __future__ import annotations

import threading
import time

from otel_ddp import catalog
from otel_ddp.recorder import Amount, Recorder

_CODES = catalog.PHASES
_OTHER = _CODES["other"]
# In the order of their codes, which count from 0.
_PHASE_LABELS = [
    (("phase", word), ("clock", "host")) for word in sorted(_CODES, key=lambda word: _CODES[word])
]
_STEP_TOTALS = (
    catalog.TRAINING_STEPS,
    catalog.TRAINING_SAMPLES,
    catalog.TRAINING_TOKENS,
    catalog.TRAINING_MICRO_BATCHES,
    catalog.TRAINING_GC_TIME,
)
# Time outside of any phase before hooks have told of a step: it is nobody's.
_NOBODYS = len(_CODES)


class Phase:
    """A phase that is open. Two of one name are two: threads may leave them in any order."""

    __slots__ = ("code", "name", "word")

    def __init__(self, name: str) -> None:
        self.name = name
        self.code = _CODES.get(name, _OTHER)
        self.word = 0  # the number of the user's own word for it


class Standing:
    """Written to the journal at each change: what is read when the process can no longer speak.

    Time is charged to the innermost phase that is open, and to no other: the phases of a step add
    up to the step. `enter` and `leave` are for hooks on the training thread, ten times a step;
    `begin` and `end` for users, from any thread.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Hooks are off before the journal is closed, so theirs needs no guard.
        self._write_phase = recorder.writer.phase
        self._lock = threading.RLock()
        self._phases: list[Phase] = []
        self._code = self._outside = _NOBODYS
        self._changed = time.perf_counter()
        self._spent = [0.0] * (len(_CODES) + 1)
        self._step_began: float | None = None
        self._number = 0
        self._logged = recorder.step
        # The phase first: nobody reads it before there is a state.
        self._recorder.phase(_OTHER, 0, time.time_ns() // 1000)
        self._become("starting")

    # -- users

    def begin(self, name: str) -> Phase:
        """Enter a phase inside the one that is open; what comes back leaves it."""
        phase = Phase(name)
        if name not in _CODES:
            phase.word = self._recorder.text_number(name)
        with self._lock:
            self._charge()
            self._phases.append(phase)
            self._tell()
            self._recorder.raise_totals(self._charges())
            if self._state == "starting":
                self._become("running")
        return phase

    def end(self, phase: Phase, took_s: float) -> None:
        """Leave a phase, the innermost one unless threads have one each."""
        with self._lock:
            self._charge()
            self._phases = [each for each in self._phases if each is not phase]
            if phase.name == "checkpoint":
                self._recorder.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                self._recorder.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            self._tell()
            self._recorder.raise_totals(self._charges())

    def running(self, now_ns: int = 0) -> None:
        """The first sign of work."""
        with self._lock:
            if self._state == "starting":
                self._become("running")

    def over(self, state: str) -> None:
        """The run has ended."""
        with self._lock:
            self._become(state)

    def _become(self, state: str) -> None:
        self._state = state
        self._recorder.state(catalog.STATES[state], time.time_ns() // 1000)

    # -- hooks

    def enter(self, phase: Phase) -> None:
        """Begin a phase inside the one that is open."""
        now = time.perf_counter()
        self._spent[self._code] += now - self._changed
        self._changed = now
        self._phases.append(phase)
        self._code = phase.code
        self._write_phase(phase.code, 0, time.time_ns() // 1000)

    def leave(self, phase: Phase) -> None:
        """End a phase, and whatever was left open inside it; nothing if it is not open."""
        phases = self._phases
        if phase not in phases:
            return
        now = time.perf_counter()
        self._spent[self._code] += now - self._changed
        self._changed = now
        while phases.pop() is not phase:
            pass
        if phases:
            around = phases[-1]
            self._code = around.code
            self._write_phase(around.code, around.word, time.time_ns() // 1000)
        else:
            self._code = self._outside
            self._write_phase(_OTHER, 0, time.time_ns() // 1000)

    def begin_steps(self) -> None:
        """Hooks have seen work: from here on time outside of any phase is part of a step."""
        if self._step_began is None:
            self._charge()
            self._outside = _OTHER
            self._step_began = self._changed
            self._tell()
            self.running()

    def step_finished(self, samples: int, tokens: int, micro_batches: int, gc_s: float) -> None:
        """The optimizer has done its step: tell how long it took, and of what."""
        self._charge()
        began, self._step_began = self._step_began, self._changed
        duration_s = 0.0 if began is None else self._changed - began
        recorder = self._recorder
        amounts = self._charges()
        for metric, amount in zip(
            _STEP_TOTALS, (1.0, samples, tokens, micro_batches, gc_s), strict=True
        ):
            if amount:
                amounts.append((metric, (), amount))
        recorder.step_finished(self._next_number(), duration_s, amounts)

    def _next_number(self) -> int:
        # The user's number where one was logged since the last step, else one more than that.
        logged = self._recorder.step
        if logged != self._logged:
            self._logged = self._number = logged
        else:
            self._number += 1
        return self._number

    # -- the clock

    def _charge(self) -> None:
        now = time.perf_counter()
        self._spent[self._code] += now - self._changed
        self._changed = now

    def _tell(self) -> None:
        """Go back to the phase that is now the innermost, and write it down."""
        phase = self._phases[-1] if self._phases else None
        self._code = self._outside if phase is None else phase.code
        code, word = (_OTHER, 0) if phase is None else (phase.code, phase.word)
        self._recorder.phase(code, word, time.time_ns() // 1000)

    def _charges(self) -> list[Amount]:
        """What was charged since the last time, for the totals."""
        charges: list[Amount] = []
        spent = self._spent
        for code, labels in enumerate(_PHASE_LABELS):
            if seconds := spent[code]:
                spent[code] = 0.0
                charges.append((catalog.TRAINING_PHASE_TIME, labels, seconds))
        return charges
