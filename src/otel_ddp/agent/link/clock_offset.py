"""How far the clock of another node is ahead of ours, from stamps of messages there and back."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class _Sample(NamedTuple):
    received_ns: int
    round_trip_ns: int
    offset_ns: int

    def contradicts(self, other: _Sample) -> bool:
        # The true offset is at most half a round trip away from each; the rest is drift.
        apart_ns = abs(self.offset_ns - other.offset_ns)
        return apart_ns > (self.round_trip_ns + other.round_trip_ns) // 2 + _DRIFT_NS


_SAMPLES = 64
# 100 parts in a million: more than a crystal's error; and that of 64 s.
_DRIFT = 1e-4
_DRIFT_NS = 6_400_000
# 100 years: a clock that was never set begins in 1970.
_MOST_NS = 3_153_600_000 * 1_000_000_000


class ClockOffset:
    """Of the last exchanges the one with the least round trip counts."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._best: _Sample | None = None

    def add(self, sent_ns: int, there_ns: int, back_ns: int, received_ns: int) -> None:
        """*sent_ns*, *received_ns*: by our clock; *there_ns*, *back_ns*: by the other one."""
        round_trip_ns = (received_ns - sent_ns) - (back_ns - there_ns)
        if received_ns < sent_ns or back_ns < there_ns or round_trip_ns < 0:
            return  # A clock was set in between.
        offset_ns = ((there_ns - sent_ns) + (back_ns - received_ns)) // 2
        sample = _Sample(received_ns, round_trip_ns, offset_ns)
        if abs(sample.offset_ns) > _MOST_NS:
            return  # No clock is that wrong.
        if self._best is not None and sample.contradicts(self._best):
            # A clock was set: what was measured before it says nothing.
            self._samples.clear()
        self._samples.append(sample)
        self._best = min(self._samples, key=lambda each: each.round_trip_ns)

    @property
    def ns(self) -> int | None:
        """What to add to our clock to get the other one; None: not known yet."""
        return None if self._best is None else self._best.offset_ns

    @property
    def uncertainty_ns(self) -> int:
        """How far the true offset may be from `ns`."""
        if self._best is None:
            return 0
        age_ns = self._samples[-1].received_ns - self._best.received_ns
        return self._best.round_trip_ns // 2 + int(_DRIFT * max(age_ns, 0))
