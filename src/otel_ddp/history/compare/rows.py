"""What is compared: the runs of both sides, and a row for each measure that both have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from otel_ddp import plain, shown
from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.blocks import Difference
from otel_ddp.history.directory import NotFound, find_run, split_names
from otel_ddp.history.reader import Bucket
from otel_ddp.history.whole_run import Cell, WholeRun
from otel_ddp.vocabulary.words import MEASURED_PHASES, UNUSUAL_PHASES

SIGNIFICANT_P = 0.01
# Below it a change is not worth a word, however certain it is.
LEAST_CHANGE = 0.01
# A phase that is less of a step than this in both runs is listed, and not tested.
_LEAST_SHARE = 0.01
# A phase that changes by less than this share of a step is not told of.
_LEAST_OF_STEP = 0.005
# Of the steps that both runs have: the part whose values are compared.
_LAST_PART = 0.2
# What people call the catalogue's words.
_CALLED = {"comm_wait": "wait"}

_BATCH = re.compile(r"batch|accumul", re.IGNORECASE)
_CONDITIONS = (
    *("nodes", "gpus", "model", "backend", "precision", "strategy"),
    *("torch", "device_runtime"),
)

_Runs = Sequence[Sequence[Cell]]


# -- the runs


class Value(NamedTuple):
    """A logged value: the means of its buckets, each by its first step."""

    name: str
    split: str
    direction: str
    """Where its best value lies: `min`, `max`, or empty."""
    means: dict[int, float]
    last: float | None
    best: float | None


class Side(NamedTuple):
    """A run as far as it is compared."""

    title: str
    conditions: dict[str, str]
    """Under which its steps were made: number of ranks, batch, device."""
    config: dict[str, str]
    cells: list[Cell]
    values: list[Value]
    look: str = ""
    """Where all of its ranks are shown; empty: here."""


def load(words: str, folder: Path, *, paths: bool = True) -> list[Side]:
    """One run by the words of a user, or several with commas between.

    *paths*: as in find_run. Raises NotFound or reader.Unreadable.
    """
    named = split_names(words, folder)
    if not named:
        raise NotFound(f"{words!r} names no run: give one, or several with commas between.")
    sides = []
    for each in named:
        with find_run(each, folder, paths=paths) as run:
            sides.append(of_run(run))
    return sides


def of_run(run: WholeRun) -> Side:
    cells = run.cells()
    config = {str(key): str(value) for key, value in sorted(run.told("config").items())}
    environment = run.told("environment")
    work = sorted(each.work for each in cells if each.work)
    conditions = {
        "ranks": str(run.world_size or len(run.ranks)),
        **{key: str(environment.get(key) or "") for key in _CONDITIONS},
        **{key: value for key, value in config.items() if _BATCH.search(key)},
        "work a step": f"{work[len(work) // 2]:.6g}" if work else "",
        "clock": ", ".join(sorted({clock for clock, _, _ in run.step_buckets.values()})),
    }
    return Side(
        f"{run.group}/{run.name}" if run.group else run.name,
        {key: value for key, value in conditions.items() if value},
        config,
        cells,
        [_value(run, *key, buckets) for key, buckets in run.values.items()],
        run.look,
    )


def _value(run: WholeRun, name: str, split: str, buckets: Sequence[Bucket]) -> Value:
    own = (row for row in run.summary if (row.get("name"), row.get("split")) == (name, split))
    summary = next(own, {})
    direction = str(summary.get("direction") or "")
    point = summary.get(direction)
    best = plain.number(plain.mapping(point).get("value"))
    newest = max(buckets, key=lambda each: each.last_ns, default=None)
    return Value(
        *(name, split, direction),
        {int(each.first): each.total / each.finite for each in buckets if each.finite},
        None if newest is None or newest.last is None else float(newest.last),
        best,
    )


# -- rows


class Row(NamedTuple):
    """One measure of both sides, and what is told of it."""

    name: str
    unit: str
    before: float | None
    after: float | None
    better: str
    """`min`, `max`, or empty."""
    difference: Difference | None = None
    """None: there was no test, and `untested` says why."""
    p: float | None = None
    """Corrected for the number of tests."""
    untested: str = ""
    split: str = ""
    of_value: bool = False
    last: tuple[float | None, float | None] = (None, None)
    best: tuple[float | None, float | None] = (None, None)
    matters: bool = True
    """False: a change of this phase is hardly any part of a step."""

    @property
    def shown(self) -> str:
        return shown.name(self.name, self.split)

    @property
    def apart(self) -> float | None:
        """By how much the second differs from the first."""
        if self.difference is not None:
            return self.difference.after - self.difference.before
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def change(self) -> float | None:
        """As a share of before; None if that is unknown or 0."""
        return self.apart / abs(self.before) if self.before and self.apart is not None else None

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

    def tested(self, found: Difference | None, why_not: str) -> Row:
        if found is None:
            return self._replace(untested=why_not)
        return self._replace(before=found.before, after=found.after, difference=found, p=found.p)


def _corrected(rows: Sequence[Row]) -> list[Row]:
    """With a p that is larger the more tests there are."""
    adjusted = iter(blocks.holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else row._replace(p=next(adjusted)) for row in rows]


def _mean_of_runs(runs: Sequence[Sequence[float]]) -> float | None:
    """Each run counts once, however long it was."""
    means = [fmean(run) for run in runs if run]
    return fmean(means) if means else None


# -- steps


def _of_phase(word: str, cell: Cell) -> float:
    return cell.phases_s.get(word, 0.0)


# By name: the unit, which end is better, and the number of a step.
_MEASURES: dict[str, tuple[str, str, Callable[[Cell], float]]] = {
    "step_time": ("s", "min", lambda cell: cell.took_s),
    "throughput": ("1/s", "max", lambda cell: cell.work / cell.took_s if cell.took_s else 0.0),
    **{
        _CALLED.get(word, word): ("s", "min", partial(_of_phase, word))
        for word in MEASURED_PHASES
        if word not in UNUSUAL_PHASES
    },
}


def step_rows(first: _Runs, second: _Runs) -> list[Row]:
    """A row for each measure that both sides have; of usual steps."""
    sides = {
        name: [[[of(cell) for cell in run] for run in runs] for runs in (first, second)]
        for name, (_, _, of) in _MEASURES.items()
    }

    def is_known(name: str) -> bool:
        runs = [any(run) for side in sides[name] for run in side]
        return name == "step_time" or (all(runs) if name == "throughput" else any(runs))

    whole, *parts = (_step_row(name, *sides[name]) for name in filter(is_known, sides))
    step_s = whole.before or 0.0, whole.after or 0.0
    return _corrected([whole, *(_weighed(row, *step_s) for row in parts)])


def _step_row(name: str, first: list[list[float]], second: list[list[float]]) -> Row:
    unit, better, _ = _MEASURES[name]
    row = Row(name, unit, _mean_of_runs(first), _mean_of_runs(second), better)
    if len(first) == len(second) == 1:
        return row.tested(blocks.of_steps(first[0], second[0]), "too few steps")
    one, other = ([blocks.trimmed_mean(run) for run in runs if run] for runs in (first, second))
    return row.tested(blocks.of_runs(one, other), "too few runs")


def _weighed(row: Row, step_s: float, other_s: float) -> Row:
    """Whether this phase is a part of the step that is worth a word."""
    if row.unit != "s":
        return row
    if (row.before or 0.0) < _LEAST_SHARE * step_s and (row.after or 0.0) < _LEAST_SHARE * other_s:
        row = row._replace(difference=None, p=None, untested="below 1 % of a step")
    return row._replace(matters=abs(row.apart or 0.0) >= _LEAST_OF_STEP * step_s)


def special_rows(before: Sequence[Side], after: Sequence[Side]) -> Iterator[Row]:
    """What comes now and then: its share of all steps, without a test."""
    for word in UNUSUAL_PHASES:
        one, other = (fmean(_share_of_all(s.cells, word) for s in runs) for runs in (before, after))
        if one or other:
            why = "not in every step"
            yield Row(word, "s", one, other, "min", untested=why, matters=False)


def _share_of_all(cells: Sequence[Cell], word: str) -> float:
    steps = sum(each.steps for each in cells)
    return sum(each.phases_s.get(word, 0.0) * each.steps for each in cells) / (steps or 1)


# -- values


def value_rows(before: Sequence[Side], after: Sequence[Side]) -> list[Row]:
    """What all runs have logged."""
    named = [
        [{(each.name, each.split): each for each in run.values} for run in runs]
        for runs in (before, after)
    ]
    return _corrected(
        [
            _value_row([run[key] for run in named[0]], [run[key] for run in named[1]])
            for key in named[0][0]
            if all(key in run for runs in named for run in runs)
        ]
    )


def _value_row(before: list[Value], after: list[Value]) -> Row:
    until = min((max(each.means) for each in (*before, *after) if each.means), default=0)
    since = until - until * _LAST_PART
    first, second = (
        [{at: mean for at, mean in each.means.items() if since <= at <= until} for each in runs]
        for runs in (before, after)
    )
    values = [[[*run.values()] for run in runs] for runs in (first, second)]
    row = Row(
        *(before[0].name, "", _mean_of_runs(values[0]), _mean_of_runs(values[1])),
        better=before[0].direction or after[0].direction,
        split=before[0].split,
        of_value=True,
        last=(_only([each.last for each in before]), _only([each.last for each in after])),
        best=(_only([each.best for each in before]), _only([each.best for each in after])),
    )
    if len(first) == len(second) == 1:
        few = min(len(first[0]), len(second[0]))
        why = f"only {few} value{'' if few == 1 else 's'} in the last part"
        return row.tested(_test_values(first[0], second[0]), why)
    means = ([fmean(run) for run in runs if run] for runs in values)
    return row.tested(blocks.of_runs(*means), "too few runs")


def _test_values(one: dict[int, float], other: dict[int, float]) -> Difference | None:
    paired = [step for step in one if step in other]
    if 2 * len(paired) >= max(len(one), len(other)):
        return blocks.of_pairs([one[step] for step in paired], [other[step] for step in paired])
    return blocks.of_values([*one.values()], [*other.values()])


def _only(found: Sequence[float | None]) -> float | None:
    """The mean over runs; None if one has none."""
    known = [each for each in found if each is not None]
    return fmean(known) if known and len(known) == len(found) else None
