"""Learns what a host needs to launch the work of a step."""

from __future__ import annotations

from collections import deque

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.words import COMPUTE_PHASES, WORK_PHASES

# A device that keeps up with its host for this part of a step's computing shows what the host
# needs: the host was not held up by a full queue of launches.
_KEEPS_UP = 0.8
# It takes so many such steps. The last ones count, for so many steps.
_FEWEST, _MOST = 3, 30
_SHOWN_STEPS = 2_000
# A host cannot need longer than a step takes now: what it has shown is out of date then.
_OUTDATED = 1.25
_COMPUTE = [WORK_PHASES.index(word) for word in COMPUTE_PHASES]


class LaunchNeed:
    """One per rank whose device's clock is known.

    A host that is ahead of its device waits for a place in the queue, so its time in forward says
    nothing of its own pace. Now and then it is not ahead: in its first steps, or after a pause.
    """

    def __init__(self) -> None:
        self._steps = 0
        # The number of the step since the beginning, and how long the host took to launch it.
        self._shown: deque[tuple[int, int]] = deque(maxlen=_MOST)

    def follow(self, facts: StepFacts) -> None:
        """One more step."""
        if facts.paced_ns is None or facts.host_ns is None:
            return
        self._steps += 1
        took_ns = sum(map(facts.phases_ns.__getitem__, _COMPUTE))
        if 0 < _KEEPS_UP * took_ns <= sum(map(facts.paced_ns.__getitem__, _COMPUTE)):
            self._shown.append((self._steps, sum(map(facts.host_ns.__getitem__, _COMPUTE))))

    def usual_ns(self, step_ns: float) -> float:
        """What it needs, where a step takes this long now; 0 where that is not known."""
        while self._shown and self._steps - self._shown[0][0] > _SHOWN_STEPS:
            self._shown.popleft()
        if len(self._shown) < _FEWEST:
            return 0.0
        usual_ns = median([ns for _, ns in self._shown])
        return usual_ns if usual_ns <= _OUTDATED * step_ns else 0.0
