"""Whether to stop early: so many evaluations have brought nothing better."""

from __future__ import annotations

from math import isfinite


class EarlyStop:
    """One a metric."""

    def __init__(self, direction: str, patience: int, min_delta: float) -> None:
        """*direction*: `min` or `max`, whichever is better."""
        self.patience = max(1, patience)
        self.best: float | None = None
        self.stopped = False
        self._sign = 1.0 if direction == "min" else -1.0
        self._min_delta = min_delta
        self._without = 0

    def feed(self, value: float) -> bool:
        """Take the value of one evaluation; true from the one on after which to stop."""
        # NaN and infinities are no better than anything.
        better = isfinite(value) and (
            self.best is None or self._sign * (self.best - value) > self._min_delta
        )
        if better:
            self.best, self._without = value, 0
        else:
            self._without += 1
        self.stopped = self.stopped or self._without >= self.patience
        return self.stopped
