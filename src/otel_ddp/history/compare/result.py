"""The result of a comparison, as the command and the page show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.rows import (
    LEAST_CHANGE,
    SIGNIFICANT_P,
    Row,
    Side,
    special_rows,
    step_rows,
    value_rows,
)
from otel_ddp.history.whole_run import Cell

# The first steps fill caches, grow buffers, tune kernels.
_WARM_UP_SHARE, _FEWEST_WARM_UP, _MOST_WARM_UP = 0.05, 10, 500

_LARGEST_CHANGE = 9.99
SCHEMA = 3
"""The number of its JSON."""


class Used(NamedTuple):
    """How many steps of a run went into the test, and how many did not."""

    used: int
    warm_up: int
    unusual: int
    pauses: int


class Differing(NamedTuple):
    """A setting that is not the same."""

    name: str
    a: str
    b: str


class Comparison(NamedTuple):
    """Two runs beside each other, or several on a side."""

    before: list[Side]
    after: list[Side]
    used: tuple[Used, Used]
    """Of all runs of a side together."""
    rows: list[Row]
    conditions: list[Differing]
    """What makes the steps differ by itself."""
    config: list[Differing]
    """Other settings that differ."""

    @property
    def block(self) -> int:
        """Steps in the longest block; 0: whole runs were compared."""
        return max((row.difference.block for row in self.rows if row.difference), default=0)

    @property
    def conclusion(self) -> str:
        """One sentence: what differs."""
        parts = []
        for verdict in ("worse", "better", "differs"):
            told = [row for row in self.rows if row.verdict == verdict]
            changes = ", ".join(f"{row.shown} {percent(row.change)}" for row in told)
            parts += [f"{verdict}: {changes}"] if told else []
        tested = any(row.difference for row in self.rows)
        nothing = "no significant difference" if tested else "nothing could be tested"
        return "; ".join(parts) or nothing

    @property
    def is_worse(self) -> bool:
        """Whether any measure is worse by more than chance explains."""
        return any(row.verdict == "worse" for row in self.rows)

    def notes(self) -> Iterator[str]:
        """How it was tested."""
        words = ("to warm up", "unusual (checkpoint, ...)", "with a pause")
        for letter, used in zip("AB", self.used, strict=True):
            counts = zip(used[1:], words, strict=True)
            left = ", ".join(f"{count} {what}" for count, what in counts if count)
            yield f"{letter}: {used.used} steps{f', without {left}' if left else ''}."
        for letter, sides in (("A", self.before), ("B", self.after)):
            yield from (
                f"{letter}: {look}." for look in dict.fromkeys(s.look for s in sides) if look
            )
        how = f"by blocks of up to {self.block} steps" if self.block else "by whole runs"
        yield (
            f"p: {how}, corrected for several tests. Told of: p < {SIGNIFICANT_P:g} and a change "
            f"of {LEAST_CHANGE * 100:g} % or more."
        )
        if self.block and any(row.verdict and not row.of_value for row in self.rows):
            yield (
                "One run on each side: where other work shares the machine, equal runs differ as "
                "well. Several on a side, A1,A2,A3 B1,B2,B3, tell the code from the machine."
            )

    def to_json(self) -> dict[str, Any]:
        """For programs and the page; docs/json.md lists the keys."""
        return {
            "schema": SCHEMA,
            "a": [each.title for each in self.before],
            "b": [each.title for each in self.after],
            "steps": [each._asdict() for each in self.used],
            "conditions": [each._asdict() for each in self.conditions],
            "config": [each._asdict() for each in self.config],
            "rows": [_json_row(row) for row in self.rows],
            "conclusion": self.conclusion,
            "notes": list(self.notes()),
        }


def _json_row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "split": row.split,
        "kind": "value" if row.of_value else "step",
        "unit": row.unit,
        "a": row.before,
        "b": row.after,
        "change": row.change,
        "difference_low": row.difference and row.difference.low,
        "difference_high": row.difference and row.difference.high,
        "p": row.p,
        "untested": row.untested or None,
        "verdict": row.verdict or None,
        "last": list(row.last),
        "best": list(row.best),
    }


def percent(share: float | None) -> str:
    if share is None:
        return "-"
    # Of what was near 0 a share says nothing.
    if abs(share) > _LARGEST_CHANGE:
        return "> +999 %" if share > 0 else "< -999 %"
    return f"{round(share * 100, 1) + 0.0:+.1f} %"


def compare(before: Sequence[Side], after: Sequence[Side]) -> Comparison:
    """All that both sides have, each one run or several."""
    first, first_used = _usual_of_all(before)
    second, second_used = _usual_of_all(after)
    others = {key for side in (*before, *after) for key in side.conditions}
    config = _differing([side.config for side in before], [side.config for side in after])
    return Comparison(
        [*before],
        [*after],
        (first_used, second_used),
        [*step_rows(first, second), *special_rows(before, after), *value_rows(before, after)],
        _differing([side.conditions for side in before], [side.conditions for side in after]),
        [each for each in config if each.name not in others],
    )


def _differing(
    before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]
) -> list[Differing]:
    def words(runs: Sequence[dict[str, str]], key: str) -> str:
        return ", ".join(sorted({each.get(key, "-") for each in runs}))

    keys = dict.fromkeys(key for each in (*before, *after) for key in each)
    found = (Differing(key, words(before, key), words(after, key)) for key in keys)
    return [each for each in found if each.a != each.b]


def _usual_of_all(runs: Sequence[Side]) -> tuple[list[list[Cell]], Used]:
    cells, used = zip(*(_usual(each.cells) for each in runs), strict=True)
    return list(cells), Used(*map(sum, zip(*used, strict=True)))


def _usual(cells: Sequence[Cell]) -> tuple[list[Cell], Used]:
    """The steps that are like most: after the warm-up, without special ones and pauses."""
    warm_up = min(max(int(_steps(cells) * _WARM_UP_SHARE), _FEWEST_WARM_UP), _MOST_WARM_UP)
    passed, warm = 0.0, list(cells)
    while warm and passed < warm_up:
        passed += warm.pop(0).steps
    usual = [each for each in warm if each.usual and each.steps]
    kept = [usual[at] for at in blocks.without_pauses([c.took_s for c in usual])] if usual else []
    used, of_usual = _steps(kept), _steps(usual)
    counts = used, passed, _steps(warm) - of_usual, of_usual - used
    return kept, Used(*map(round, counts))


def _steps(cells: Sequence[Cell]) -> float:
    return sum(each.steps for each in cells)
