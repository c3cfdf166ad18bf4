"""Compares two sides: how long a step takes, and what it is made of; what each value came to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.row import Row
from otel_ddp.history.compare.side import Side
from otel_ddp.history.compare.step_rows import special_rows, step_rows
from otel_ddp.history.compare.value_rows import value_rows
from otel_ddp.history.group_steps import Cell

# The first steps fill caches, grow buffers, tune kernels.
_WARM_UP_SHARE, _FEWEST_WARM_UP, _MOST_WARM_UP = 0.05, 10, 500


class Used(NamedTuple):
    """How many steps of a run went into the test, and how many did not."""

    used: int
    warm_up: int
    unusual: int
    pauses: int


class Comparison(NamedTuple):
    """Two runs beside each other."""

    before: list[Side]
    after: list[Side]
    used: tuple[Used, Used]
    """Of all runs of a side together."""
    rows: list[Row]
    conditions: list[tuple[str, str, str]]
    """What is not the same, and makes the steps differ by itself."""
    config: list[tuple[str, str, str]]
    """Other settings that differ."""
    block: int
    """Steps in the longest block."""

    def named(self, name: str, split: str | None = None) -> list[Row]:
        """The rows of this name; of any split unless one is given."""
        return [row for row in self.rows if row.name == name and split in (None, row.split)]


def compare(
    before: Sequence[Side], after: Sequence[Side], warm_up: int | None = None
) -> Comparison:
    """All that both sides have, each one run or several.

    *warm_up*: steps to leave out, instead of our choice.
    """
    first, first_used = _usual_of_all(before, warm_up)
    second, second_used = _usual_of_all(after, warm_up)
    rows = [*step_rows(first, second), *special_rows(before, after), *value_rows(before, after)]
    sides = (*before, *after)
    others = {key for side in sides for key in side.conditions}
    config = _differing([side.config for side in before], [side.config for side in after])
    return Comparison(
        *([*before], [*after], (first_used, second_used), rows),
        _differing([side.conditions for side in before], [side.conditions for side in after]),
        [each for each in config if each[0] not in others],
        max((row.difference.block for row in rows if row.difference), default=0),
    )


def _differing(
    before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]
) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys(key for each in (*before, *after) for key in each)
    pairs = [(key, _words(before, key), _words(after, key)) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]


def _words(runs: Sequence[dict[str, str]], key: str) -> str:
    return ", ".join(sorted({each.get(key, "-") for each in runs}))


# -- steps


def _usual_of_all(runs: Sequence[Side], warm_up: int | None) -> tuple[list[list[Cell]], Used]:
    cells, used = zip(*(_usual(each.cells, warm_up) for each in runs), strict=True)
    return list(cells), Used(*map(sum, zip(*used, strict=True)))


def _usual(cells: Sequence[Cell], warm_up: int | None) -> tuple[list[Cell], Used]:
    """The steps that are like most: after the warm-up, without special ones and pauses."""
    total = sum(each.steps for each in cells)
    if warm_up is None:
        share = int(total * _WARM_UP_SHARE)
        warm_up = min(max(share, _FEWEST_WARM_UP), _MOST_WARM_UP)
    passed, warm = 0.0, list(cells)
    while warm and passed < warm_up:
        passed += warm.pop(0).steps
    usual = [each for each in warm if each.usual and each.steps]
    unusual = sum(each.steps for each in warm) - sum(each.steps for each in usual)
    kept = [usual[at] for at in blocks.without_pauses([c.took_s for c in usual])] if usual else []
    used = sum(each.steps for each in kept)
    pauses = sum(each.steps for each in usual) - used
    return kept, Used(round(used), round(passed), round(unusual), round(pauses))
