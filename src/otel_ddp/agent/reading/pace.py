"""The current step time of one rank, and the share of this time spent waiting for other ranks."""

from __future__ import annotations

from otel_ddp.diagnosis.detector import Observation

# A period ends with the step that reaches this length. A window covers the current period and the
# one before it.
_WINDOW_NS = 5_000_000_000


class _Window:
    """Sums over the last few seconds: number of steps, their total time, and a part of that
    time."""

    def __init__(self) -> None:
        self._sums = self._before = (0, 0, 0)

    def add(self, steps: int, took_ns: int, part_ns: int = 0) -> None:
        if self._sums[1] >= _WINDOW_NS:
            self._before, self._sums = self._sums, (0, 0, 0)
        so_far, so_far_ns, so_far_part_ns = self._sums
        self._sums = so_far + steps, so_far_ns + took_ns, so_far_part_ns + part_ns

    def total(self) -> tuple[int, int, int]:
        (steps, took_ns, part_ns), before = self._sums, self._before
        return steps + before[0], took_ns + before[1], part_ns + before[2]


class Pace:
    """The pace of one rank. The judge feeds it; other threads may read it."""

    def __init__(self) -> None:
        self._steps, self._waits = _Window(), _Window()

    def feed(self, seen: Observation) -> None:
        """Add an observation."""
        # Two clocks: the step time covers all steps, on the host's clock, which every rank has. The
        # share of waits covers only measured steps without unusual phases such as compilation, on
        # the clock that times the waits.
        ended = [each for each in seen.steps if each.number is not None]
        if ended:
            self._steps.add(len(ended), sum([each.ended_ns - each.began_ns for each in ended]))
        usual = [each for each in seen.facts if each.measured and not each.unusual]
        if usual:
            took_ns = sum([each.took_ns for each in usual])
            self._waits.add(len(usual), took_ns, sum([each.wait_ns for each in usual]))

    @property
    def step_s(self) -> float | None:
        """Seconds per step; None if unknown."""
        steps, took_ns, _ = self._steps.total()
        return float(f"{took_ns / steps / 1e9:.3g}") if steps else None

    @property
    def wait_ratio(self) -> float | None:
        """The share of the step time spent waiting; None if unknown."""
        _, all_ns, waits_ns = self._waits.total()
        return round(waits_ns / all_ns, 3) if all_ns else None
