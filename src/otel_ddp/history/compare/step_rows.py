"""How long a step takes on both sides, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from otel_ddp.history.compare import blocks, pace
from otel_ddp.history.compare.pace import Beside
from otel_ddp.history.compare.row import Row, corrected, mean_of_runs
from otel_ddp.history.compare.side import Side
from otel_ddp.history.group_steps import Cell
from otel_ddp.words import UNUSUAL_PHASES

# A phase that is less of a step than this in both runs is listed, and not tested.
_LEAST_SHARE = 0.01
# A phase that changes by less than this share of a step is not told of.
_LEAST_OF_STEP = 0.005
# A change beside the others that is larger than the one that was measured, by more than this, is
# one of the others where the pace does not explain it.
_MOST_BEYOND = 1.1
# Steps in a cell, on average, for its fast ones to be found.
_MOST_TOGETHER = 4

STEP_TIME, THROUGHPUT = "step_time", "throughput"
# What people call the catalogue's words.
PHASE_NAMES = {"comm_wait": "wait"}
_NO_WORK = ("comm_wait",)

_Runs = Sequence[Sequence[Cell]]
_Series = Sequence[Sequence[float]]


class _Measure(NamedTuple):
    """One number of each step, of all runs of both sides."""

    name: str
    unit: str
    better: str
    before: _Series
    after: _Series
    is_work: bool = False
    """Whether it is a phase in which the ranks do work of their own."""

    @property
    def is_known(self) -> bool:
        return all(any(run) for side in (self.before, self.after) for run in side)

    @property
    def is_one_run_a_side(self) -> bool:
        return len(self.before) == len(self.after) == 1


def step_rows(first: _Runs, second: _Runs) -> list[Row]:
    """A row for each measure that both sides have."""
    measures = _measures(first, second)
    rows = [_row(each) for each in measures]
    step_s = [rows[0].before or 0.0, rows[0].after or 0.0]
    rows = corrected([rows[0], *(_weighed(row, step_s) for row in rows[1:])])
    if measures[0].is_one_run_a_side and _has_fast_steps((*first, *second)):
        rows = _with_what_is_no_pace([each for each in measures if each.is_work], rows, step_s)
    return rows


def _measures(first: _Runs, second: _Runs) -> list[_Measure]:
    def measure(
        of: Callable[[Cell], float], name: str, unit: str, better: str, is_work: bool = False
    ) -> _Measure:
        before, after = ([[of(cell) for cell in run] for run in side] for side in (first, second))
        return _Measure(name, unit, better, before, after, is_work)

    found = [measure(lambda cell: cell.took_s, STEP_TIME, "s", "min")]
    work = measure(
        lambda cell: cell.work / cell.took_s if cell.took_s else 0.0, THROUGHPUT, "1/s", "max"
    )
    if work.is_known:
        found.append(work)
    every = (run[0] for side in (first, second) for run in side if run)
    for word in dict.fromkeys(word for cell in every for word in cell.phases_s):
        if word in UNUSUAL_PHASES:
            continue
        name = PHASE_NAMES.get(word, word)
        each = measure(
            lambda cell, word=word: cell.phases_s.get(word, 0.0),  # type: ignore[misc]
            *(name, "s", "min", word not in _NO_WORK),
        )
        if any(any(run) for side in (each.before, each.after) for run in side):
            found.append(each)
    return found


def _row(measure: _Measure) -> Row:
    name, unit, better, first, second, _ = measure
    if measure.is_one_run_a_side:
        found, why = blocks.test(first[0], second[0]), "too few steps"
    else:
        one, other = ([blocks.trimmed_mean(run) for run in runs if run] for runs in (first, second))
        found, why = blocks.test_runs(one, other), "too few runs"
    if found is None:
        before, after = mean_of_runs(first), mean_of_runs(second)
        return Row(name, unit, before, after, better, None, None, why)
    return Row(name, unit, found.before, found.after, better, found, found.p)


def _weighed(row: Row, step_s: Sequence[float]) -> Row:
    """Whether this phase is a part of the step that is worth a word."""
    if row.unit != "s":
        return row
    before, after = row.before or 0.0, row.after or 0.0
    if before < _LEAST_SHARE * step_s[0] and after < _LEAST_SHARE * step_s[1]:
        row = row._replace(difference=None, p=None, untested="below 1 % of a step")
    return row._replace(matters=abs(row.apart or 0.0) >= _LEAST_OF_STEP * step_s[0])


# -- one run on each side


def _has_fast_steps(runs: _Runs) -> bool:
    """Whether what is known is about single steps, or few; a mean of many is never fast."""
    return all(fmean(cell.steps for cell in run) <= _MOST_TOGETHER for run in runs if run)


def _with_what_is_no_pace(
    work: Sequence[_Measure], rows: Sequence[Row], step_s: Sequence[float]
) -> list[Row]:
    """A phase that has changed beside the others is told, though the pace may hide by how much."""
    changed = pace.most_changed(
        {each.name: each.before[0] for each in work}, {each.name: each.after[0] for each in work}
    )
    if changed is None:
        return [*rows]
    return [
        _weighed(row._replace(p=changed.p, beside=changed), step_s)
        if row.name == changed.phase and not row.significant and _fits_the_clock(row, changed)
        else row
        for row in rows
    ]


def _fits_the_clock(row: Row, changed: Beside) -> bool:
    """Whether the pace of these runs varies enough to explain what else is seen of this phase.

    Where it is steady, a phase that stays as it is only looks slower once the others are faster.
    """
    if row.before is None or row.apart is None or row.difference is None:
        return False
    apart = changed.change * row.before
    is_alike = row.apart * apart > 0 and abs(apart) <= _MOST_BEYOND * abs(row.apart)
    return is_alike or row.difference.low <= apart <= row.difference.high


# -- what is not in every step


def special_rows(before: Sequence[Side], after: Sequence[Side]) -> list[Row]:
    """What comes now and then: its share of all steps, without a test."""
    rows = []
    for word in UNUSUAL_PHASES:
        one, other = (fmean(_share_of_all(s.cells, word) for s in runs) for runs in (before, after))
        if one or other:
            why = "not in every step"
            rows.append(Row(word, "s", one, other, "min", None, None, why, matters=False))
    return rows


def _share_of_all(cells: Sequence[Cell], word: str) -> float:
    steps = sum(each.steps for each in cells)
    return sum(each.phases_s.get(word, 0.0) * each.steps for each in cells) / (steps or 1)
