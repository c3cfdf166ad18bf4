"""The lowest and the highest value of each name that a rank has logged, over all its attempts."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels

# A name and its split.
Key = tuple[str, str]

# Beyond it a name has no summary: this much is written again whenever an extreme changes.
MOST_NAMES = 200


class Point(NamedTuple):
    """One logged value."""

    value: float
    step: int | None
    time_ns: int


class Extremes:
    """Those of one name and split; the first of several equal values counts."""

    __slots__ = ("highest", "lowest")

    def __init__(self, lowest: Point, highest: Point) -> None:
        self.lowest = lowest
        self.highest = highest

    def best(self, direction: str) -> Point:
        """The best of all values; *direction*: `min` or `max`."""
        return self.lowest if direction == "min" else self.highest


class Summary:
    """One a rank. The caller of every method holds the ledger's lock."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change."""
        self._extremes: dict[Key, Extremes] = {}

    def items(self) -> Iterator[tuple[Key, Extremes]]:
        """Each name and split, in the order in which they came."""
        return iter(self._extremes.items())

    def feed(self, key: Key, value: float, step: int | None, time_ns: int) -> None:
        """Take a value into account; one that comes again changes nothing."""
        known = self._extremes.get(key)
        if known is None:
            if isfinite(value) and len(self._extremes) < MOST_NAMES:
                only = Point(value, step, time_ns)
                self._extremes[key] = Extremes(only, only)
                self.version += 1
        # NaN is neither.
        elif value < known.lowest.value:
            if isfinite(value):
                known.lowest = Point(value, step, time_ns)
                self.version += 1
        elif value > known.highest.value and isfinite(value):
            known.highest = Point(value, step, time_ns)
            self.version += 1


class Summaries:
    """Those of all ranks of this node: a rank that is started again goes on with its summary."""

    def __init__(self) -> None:
        self._summaries: dict[Labels, Summary] = {}

    def of(self, labels: Labels) -> Summary:
        """The summary of the rank with these labels, made at its first use."""
        return self._summaries.setdefault(labels, Summary())

    def forget(self, labels: Labels) -> None:
        """Forget a rank whose series are dropped."""
        self._summaries.pop(labels, None)
