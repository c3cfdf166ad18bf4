"""Compares two sides: how long a step takes, and what it is made of; what each value came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.blocks import Difference
from otel_ddp.history.compare.side import Side, Value
from otel_ddp.history.group_steps import SPECIAL_PHASES, Cell

SIGNIFICANT_P = 0.01
# Below it a change is not worth a word, however certain it is.
LEAST_CHANGE = 0.01
# A phase that is less of a step than this in both runs is listed, and not tested.
_LEAST_SHARE = 0.01
# A phase that changes by less than this share of a step is not told of.
_LEAST_OF_STEP = 0.005
# The first steps fill caches, grow buffers, tune kernels.
_WARM_UP_SHARE, _FEWEST_WARM_UP, _MOST_WARM_UP = 0.05, 10, 500
# Of the steps that both runs have: the part whose values are compared.
_LAST_PART = 0.2

STEP_TIME, THROUGHPUT = "step_time", "throughput"
# What people call the catalogue's words.
PHASE_NAMES = {"comm_wait": "wait"}


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

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.split})" if self.split else self.name

    @property
    def change(self) -> float | None:
        """As a share of before; None if that is unknown or 0."""
        if self.before is None or self.after is None or not self.before:
            return None
        return (self.after - self.before) / abs(self.before)

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
        if not self.better or self.before is None or self.after is None:
            return "differs"
        return "better" if (self.after < self.before) == (self.better == "min") else "worse"


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
    rows = [*_corrected(_step_rows(first, second)), *_special_rows(before, after)]
    rows += _corrected(_value_rows(before, after))
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


_Runs = Sequence[Sequence[float]]


def _step_rows(first: Sequence[Sequence[Cell]], second: Sequence[Sequence[Cell]]) -> list[Row]:
    def both(of: Callable[[Cell], float]) -> tuple[list[list[float]], list[list[float]]]:
        one, other = ([[of(cell) for cell in run] for run in side] for side in (first, second))
        return one, other

    rows = [_row(STEP_TIME, "s", "min", *both(lambda cell: cell.took_s))]
    work = both(lambda cell: cell.work / cell.took_s if cell.took_s else 0.0)
    if all(any(run) for side in work for run in side):
        rows.append(_row(THROUGHPUT, "1/s", "max", *work))
    step_s = [rows[0].before or 0.0, rows[0].after or 0.0]
    every = (run[0] for side in (first, second) for run in side if run)
    for word in dict.fromkeys(word for cell in every for word in cell.phases_s):
        columns = both(lambda cell, word=word: cell.phases_s.get(word, 0.0))  # type: ignore[misc]
        if word in SPECIAL_PHASES or not any(any(run) for side in columns for run in side):
            continue
        row = _row(PHASE_NAMES.get(word, word), "s", "min", *columns)
        before, after = row.before or 0.0, row.after or 0.0
        if before < _LEAST_SHARE * step_s[0] and after < _LEAST_SHARE * step_s[1]:
            row = row._replace(difference=None, p=None, untested="below 1 % of a step")
        rows.append(row._replace(matters=abs(after - before) >= _LEAST_OF_STEP * step_s[0]))
    return rows


def _row(name: str, unit: str, better: str, first: _Runs, second: _Runs) -> Row:
    before, after = _mean_of_runs(first), _mean_of_runs(second)
    if len(first) == len(second) == 1:
        found, why = blocks.test(first[0], second[0]), "too few steps"
    else:
        one, other = ([blocks.trimmed_mean(run) for run in runs if run] for runs in (first, second))
        found, why = blocks.test_runs(one, other), "too few runs"
    if found is None:
        return Row(name, unit, before, after, better, None, None, why)
    return Row(name, unit, found.before, found.after, better, found, found.p)


def _mean_of_runs(runs: _Runs) -> float | None:
    means = [fmean(run) for run in runs if run]
    return fmean(means) if means else None


def _special_rows(before: Sequence[Side], after: Sequence[Side]) -> list[Row]:
    """What comes now and then: its share of all steps, without a test."""
    rows = []
    for word in SPECIAL_PHASES:
        one, other = (fmean(_share_of_all(s.cells, word) for s in runs) for runs in (before, after))
        if one or other:
            why = "not in every step"
            rows.append(Row(word, "s", one, other, "min", None, None, why, matters=False))
    return rows


def _share_of_all(cells: Sequence[Cell], word: str) -> float:
    steps = sum(each.steps for each in cells)
    return sum(each.phases_s.get(word, 0.0) * each.steps for each in cells) / (steps or 1)


def _corrected(rows: Sequence[Row]) -> list[Row]:
    tested = [row for row in rows if row.difference is not None]
    adjusted = iter(blocks.holm([row.difference.p for row in tested if row.difference]))
    return [row if row.difference is None else row._replace(p=next(adjusted)) for row in rows]


# -- values


_Values = list[Value]


def _value_rows(before: Sequence[Side], after: Sequence[Side]) -> list[Row]:
    """What all runs have logged."""
    rows = []
    for key in ((each.name, each.split) for each in before[0].values):
        one, other = ([_value(run, *key) for run in runs] for runs in (before, after))
        first, second = ([each for each in runs if each is not None] for runs in (one, other))
        if len(first) == len(one) and len(second) == len(other):
            rows.append(_value_row(first, second))
    return rows


def _value(side: Side, name: str, split: str) -> Value | None:
    return next((each for each in side.values if (each.name, each.split) == (name, split)), None)


def _value_row(before: _Values, after: _Values) -> Row:
    until = min((each.steps[-1] for each in (*before, *after) if each.steps), default=0)
    first, second = ([_last_part(each, until) for each in runs] for runs in (before, after))
    if len(first) == len(second) == 1:
        [one], [other] = first, second
        found = _test_values(one, other)
        why = f"only {min(len(one), len(other))} values in the last part"
    else:
        means = ([fmean(run.values()) for run in runs if run] for runs in (first, second))
        found, why = blocks.test_runs(*means), "too few runs"
    if found is None:
        means_of_both = (
            _mean_of_runs([[*run.values()] for run in runs]) for runs in (first, second)
        )
        shown = (*means_of_both,)
    else:
        shown = (found.before, found.after)
    return Row(
        before[0].name,
        "",
        shown[0],
        shown[1],
        before[0].direction or after[0].direction,
        found,
        None if found is None else found.p,
        "" if found else why,
        before[0].split,
        True,
        (_only([each.last for each in before]), _only([each.last for each in after])),
        (_only([each.best for each in before]), _only([each.best for each in after])),
    )


def _last_part(value: Value, until: int) -> dict[int, float]:
    since = until - until * _LAST_PART
    pairs = zip(value.steps, value.means, strict=True)
    return {step: mean for step, mean in pairs if since <= step <= until}


def _test_values(one: dict[int, float], other: dict[int, float]) -> Difference | None:
    paired = [step for step in one if step in other]
    if 2 * len(paired) >= max(len(one), len(other)):
        return blocks.test_pairs([one[step] for step in paired], [other[step] for step in paired])
    return blocks.test_values([*one.values()], [*other.values()])


def _only(found: Sequence[float | None]) -> float | None:
    """The mean over runs; None if one has none."""
    known = [each for each in found if each is not None]
    return fmean(known) if known and len(known) == len(found) else None
