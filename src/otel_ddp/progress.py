"""Where this process stands: its state, its phase, since when."""

from __future__ import annotations

import threading
import time

from otel_ddp import catalog
from otel_ddp.recorder import Recorder


class Phase:
    """A phase that is open. Two of one name are two: threads may leave them in any order."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Standing:
    """Written to the journal at each change: what is read when the process can no longer speak."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.RLock()
        self._phases: list[Phase] = []
        self._changed = time.perf_counter()
        # The phase first: nobody reads it before there is a state.
        self._stand()
        self._enter("starting")

    def begin(self, name: str) -> Phase:
        """Enter a phase inside the one that is open; what comes back leaves it."""
        phase = Phase(name)
        with self._lock:
            self._spend()
            self._phases.append(phase)
            if self._state == "starting":
                self._enter("running")
            self._stand()
        return phase

    def end(self, phase: Phase, took_s: float) -> None:
        """Leave a phase, the innermost one unless threads have one each."""
        with self._lock:
            self._spend()
            self._phases = [each for each in self._phases if each is not phase]
            if phase.name == "checkpoint":
                self._recorder.observe(catalog.TRAINING_CHECKPOINT_DURATION, took_s)
                self._recorder.stamp(catalog.TRAINING_CHECKPOINT_TIMESTAMP, time.time())
            self._stand()

    def running(self, now_ns: int = 0) -> None:
        """The first sign of work."""
        with self._lock:
            if self._state == "starting":
                self._enter("running")

    def over(self, state: str) -> None:
        """The run has ended."""
        with self._lock:
            self._enter(state)

    def _enter(self, state: str) -> None:
        self._state = state
        self._recorder.state(catalog.STATES[state], time.time_ns() // 1000)

    def _spend(self) -> None:
        """Charge the time since the last change to the innermost phase: none counts twice."""
        now = time.perf_counter()
        spent_s, self._changed = now - self._changed, now
        if self._phases:
            name = self._phases[-1].name
            phase = name if name in catalog.PHASES else "other"
            metric = catalog.TRAINING_PHASE_TIME
            self._recorder.count(metric, spent_s, phase=phase, clock="host")

    def _stand(self) -> None:
        """Write down the innermost phase that is open, as of now."""
        phase = self._phases[-1].name if self._phases else "other"
        code, name = catalog.PHASES.get(phase), 0
        if code is None:
            code, name = catalog.PHASES["other"], self._recorder.text_number(phase)
        self._recorder.phase(code, name, time.time_ns() // 1000)
