"""The time per step that a process spends in each phase, over the last two minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from otel_ddp import catalog
from otel_ddp.journal.reader import Total
from otel_ddp.words import UNUSUAL_PHASES

_WINDOW_NS = 120 * 10**9
# So the window is up to this much longer, and holds two dozen readings.
_KEEP_EVERY_NS = 5 * 10**9
# Every step has them, so 0 is told too. Of the others only what has taken time.


class _Reading(NamedTuple):
    at_ns: int
    steps: float
    seconds: Mapping[tuple[str, str], float]
    """By clock and phase."""


class StepTimes:
    """One a process: of its totals now and two minutes ago."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def feed(self, totals: Iterable[Total], now_ns: int) -> dict[str, float]:
        """The seconds per step by phase; {} where there was no step.

        By the clock of the device, where that has counted: its host only launches, and may run
        ahead.
        """
        now = _reading(totals, now_ns)
        readings = self._readings
        # A clock that was set back must not keep old readings for ever.
        while readings and not 0 <= now_ns - readings[0].at_ns <= _WINDOW_NS + _KEEP_EVERY_NS:
            readings.popleft()
        before = readings[0] if readings else now
        if not readings or now_ns - readings[-1].at_ns >= _KEEP_EVERY_NS:
            readings.append(now)
        steps = now.steps - before.steps
        if steps <= 0:
            return {}
        grown = {
            key: seconds - before.seconds.get(key, 0.0) for key, seconds in now.seconds.items()
        }
        on_device = any(seconds > 0 for (clock, _), seconds in grown.items() if clock == "device")
        counts = "device" if on_device else "host"
        return {
            phase: seconds / steps
            for (clock, phase), seconds in grown.items()
            if clock == counts and (seconds > 0 or phase not in UNUSUAL_PHASES)
        }


def _reading(totals: Iterable[Total], now_ns: int) -> _Reading:
    steps, seconds = 0.0, dict[tuple[str, str], float]()
    for total in totals:
        if total.metric == catalog.TRAINING_STEPS.name:
            steps += total.values[0]
        elif total.metric == catalog.TRAINING_PHASE_TIME.name:
            key = (str(total.attributes.get("clock")), str(total.attributes.get("phase")))
            seconds[key] = seconds.get(key, 0.0) + total.values[0]
    return _Reading(now_ns, steps, seconds)
