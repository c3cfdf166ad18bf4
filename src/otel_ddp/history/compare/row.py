"""One measure of both sides, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.blocks import Difference
from otel_ddp.history.compare.pace import Beside

SIGNIFICANT_P = 0.01
# Below it a change is not worth a word, however certain it is.
LEAST_CHANGE = 0.01


class Row(NamedTuple):
    """One measure of both runs."""

    name: str
    unit: str
    before: float | None
    after: float | None
    better: str
    """`min`, `max`, or empty."""
    difference: Difference | None
    """None: there was no test, and `untested` says why."""
    p: float | None
    """Corrected for the number of tests."""
    untested: str = ""
    split: str = ""
    of_value: bool = False
    lasts: tuple[float | None, float | None] = (None, None)
    bests: tuple[float | None, float | None] = (None, None)
    matters: bool = True
    """False: a change of this phase is hardly any part of a step."""
    beside: Beside | None = None
    """If not None, the change is this: a machine with another pace does not explain it."""

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.split})" if self.split else self.name

    @property
    def change(self) -> float | None:
        """As a share of before; None if that is unknown or 0."""
        if self.apart is None or not self.before:
            return None
        return self.apart / abs(self.before)

    @property
    def apart(self) -> float | None:
        """By how much the second differs from the first."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before if self.beside is None else self.beside.change * self.before

    @property
    def interval(self) -> tuple[float, float] | None:
        """The change lies between these, with a confidence of 99 %."""
        if self.beside is not None and self.before is not None:
            return self.beside.low * self.before, self.beside.high * self.before
        found = self.difference
        return None if found is None else (found.low, found.high)

    @property
    def significant(self) -> bool:
        """Whether chance does not explain the difference."""
        return self.p is not None and self.p < SIGNIFICANT_P

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `differs`, or empty if there is nothing to say."""
        changed = self.change is None or abs(self.change) >= LEAST_CHANGE
        if not (self.significant and changed and self.matters):
            return ""
        if not self.better or self.apart is None:
            return "differs"
        return "better" if (self.apart < 0) == (self.better == "min") else "worse"


def corrected(rows: Sequence[Row]) -> list[Row]:
    """With a p that is larger the more tests there are."""
    adjusted = iter(blocks.holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else row._replace(p=next(adjusted)) for row in rows]


def mean_of_runs(runs: Sequence[Sequence[float]]) -> float | None:
    """Each run counts once, however long it was."""
    means = [fmean(run) for run in runs if run]
    return fmean(means) if means else None
