"""Compares two runs: what differs, and whether chance explains it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from otel_ddp import plain, shown
from otel_ddp.history import blocks
from otel_ddp.history.buckets import Bucket
from otel_ddp.history.directory import find_run
from otel_ddp.history.whole_run import Cell, WholeRun
from otel_ddp.vocabulary.words import MEASURED_PHASES, UNUSUAL_PHASES

SCHEMA = 5
"""The number of its JSON."""
_SIGNIFICANT_P = 0.01
# Below it a change is not worth a word, however certain it is.
_LEAST_CHANGE = 0.01
# A phase that changes by less than this share of a step is not told of.
_LEAST_OF_STEP = 0.005
# Of the steps that both runs have: the part whose values are compared.
_LAST_PART = 0.2
# What people call the catalogue's words.
_CALLED = {"comm_wait": "wait"}

# The first steps fill caches, grow buffers, tune kernels.
_WARM_UP_SHARE, _FEWEST_WARM_UP, _MOST_WARM_UP = 0.05, 10, 500
_LARGEST_CHANGE = 9.99
_HEADS = ("per step", "A", "B", "change", "p", "")
_VALUE_HEADS = ("value, last part", "A", "B", "change", "p", "last A", "last B", "best A", "best B")
_BATCH = re.compile(r"batch|accumul", re.IGNORECASE)
_CONDITIONS = (
    *("nodes", "gpus", "model", "backend", "precision", "strategy"),
    *("torch", "device_runtime"),
)


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


def load(words: str, folder: Path, *, paths: bool = True) -> Side:
    """One run by the words of a user.

    *paths*: as in find_run. Raises NotFound or reader.Unreadable.
    """
    with find_run(words, folder, paths=paths) as run:
        return of_run(run)


def of_run(run: WholeRun) -> Side:
    cells = run.cells()
    config = {str(key): str(value) for key, value in sorted(run.told("config").items())}
    environment = run.told("environment")
    work = sorted(each.work for each in cells if each.work)
    conditions = {
        "ranks": str(run.world_size or len(run.ranks)),
        **{key: str(environment.get(key) or "") for key in _CONDITIONS},
        **{key: value for key, value in config.items() if _BATCH.search(key)},
        "work a step": shown.number(float(f"{work[len(work) // 2]:.6g}")) if work else "",
        "clock": ", ".join(sorted({one.key.name for _, one in run.step_series()})),
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
        None if newest is None else math.nan if newest.last is None else float(newest.last),
        best,
    )


# -- rows


class Row(NamedTuple):
    """One measure of both sides, and what is told of it."""

    name: str
    unit: str
    better: str
    """`min`, `max`, or empty."""
    before: float | None = None
    after: float | None = None
    p: float | None = None
    """Corrected for the number of tests; None: there was none, and `untested` says why."""
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
        return self.p is not None and self.p < _SIGNIFICANT_P

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `differs`, or empty if there is nothing to say."""
        changed = self.change is None or abs(self.change) >= _LEAST_CHANGE
        if not (self.significant and changed and self.matters):
            return ""
        if not self.better or self.apart is None:
            return "differs"
        return "better" if (self.apart < 0) == (self.better == "min") else "worse"


def _corrected(rows: Sequence[Row]) -> list[Row]:
    """With a p that is larger the more tests there are."""
    adjusted = iter(blocks.holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else row._replace(p=next(adjusted)) for row in rows]


def _tested(
    row: Row, first: Sequence[float], second: Sequence[float], p: float | None, too_few: str
) -> Row:
    before, after = (fmean(each) if each else None for each in (first, second))
    return row._replace(before=before, after=after, p=p, untested=too_few if p is None else "")


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


def step_rows(first: Sequence[Cell], second: Sequence[Cell]) -> list[Row]:
    """A row for each measure that both sides have; of usual steps."""
    sides = {
        name: [[of(cell) for cell in cells] for cells in (first, second)]
        for name, (_, _, of) in _MEASURES.items()
    }

    def is_known(name: str) -> bool:
        known = map(any, sides[name])
        return name == "step_time" or (all(known) if name == "throughput" else any(known))

    whole, *parts = (_step_row(name, *sides[name]) for name in filter(is_known, sides))
    return _corrected([whole, *(_weighed(row, whole.before or 0.0) for row in parts)])


def _step_row(name: str, first: list[float], second: list[float]) -> Row:
    unit, better, _ = _MEASURES[name]
    tested = first, second
    if name == "throughput":
        # By the time that a unit takes, so that it says what the time of a step says: a few quick
        # steps outweigh all others in a mean of units a second.
        tested = _inverse(first), _inverse(second)
    p = blocks.of_steps(*tested)
    return _tested(Row(name, unit, better), first, second, p, "too few steps")


def _inverse(values: Sequence[float]) -> list[float]:
    return [1 / each if each else 0.0 for each in values]


def _weighed(row: Row, step_s: float) -> Row:
    """Whether the change of this phase is a part of the step that is worth a word."""
    is_small = row.unit == "s" and abs(row.apart or 0.0) < _LEAST_OF_STEP * step_s
    return row._replace(matters=not is_small)


def special_rows(before: Side, after: Side) -> Iterator[Row]:
    """What comes now and then: its share of all steps, without a test."""
    for word in UNUSUAL_PHASES:
        one, other = (_share_of_all(each.cells, word) for each in (before, after))
        if one or other:
            why = "not in every step"
            yield Row(word, "s", "min", one, other, untested=why, matters=False)


def _share_of_all(cells: Sequence[Cell], word: str) -> float:
    steps = sum(each.steps for each in cells)
    return sum(each.phases_s.get(word, 0.0) * each.steps for each in cells) / (steps or 1)


# -- values


def value_rows(before: Side, after: Side) -> list[Row]:
    """What both runs have logged."""
    others = {(each.name, each.split): each for each in after.values}
    return _corrected(
        [
            _value_row(each, others[key])
            for each in before.values
            if (key := (each.name, each.split)) in others
        ]
    )


def _value_row(before: Value, after: Value) -> Row:
    until = min((max(each.means) for each in (before, after) if each.means), default=0)
    since = until - until * _LAST_PART
    first, second = (
        {at: mean for at, mean in each.means.items() if since <= at <= until}
        for each in (before, after)
    )
    few = min(len(first), len(second))
    row = Row(
        before.name,
        "",
        before.direction or after.direction,
        split=before.split,
        of_value=True,
        last=(before.last, after.last),
        best=(before.best, after.best),
    )
    return _tested(
        row,
        [*first.values()],
        [*second.values()],
        _test_values(first, second),
        f"only {few} value{'' if few == 1 else 's'} in the last part",
    )


def _test_values(one: dict[int, float], other: dict[int, float]) -> float | None:
    paired = [step for step in one if step in other]
    if 2 * len(paired) >= max(len(one), len(other)):
        return blocks.of_pairs([one[step] for step in paired], [other[step] for step in paired])
    return blocks.of_values([*one.values()], [*other.values()])


# -- all of it


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
    """Two runs beside each other."""

    before: Side
    after: Side
    used: tuple[Used, Used]
    rows: list[Row]
    conditions: list[Differing]
    """What makes the steps differ by itself."""
    config: list[Differing]
    """Other settings that differ."""

    @property
    def conclusion(self) -> str:
        """One sentence: what differs."""
        parts = []
        for verdict in ("worse", "better", "differs"):
            told = [row for row in self.rows if row.verdict == verdict]
            changes = ", ".join(f"{row.shown} {percent(row.change)}" for row in told)
            parts += [f"{verdict}: {changes}"] if told else []
        if parts:
            return "; ".join(parts)
        tested = any(row.p is not None for row in self.rows)
        return "no significant difference" if tested else "nothing could be tested"

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
        for letter, side in (("A", self.before), ("B", self.after)):
            if side.look:
                yield f"{letter}: {side.look}."
        yield (
            "p: by blocks of steps, corrected for several tests. Reported: p < "
            f"{_SIGNIFICANT_P:g} and a change of {_LEAST_CHANGE * 100:g} % or more."
        )
        if any(row.verdict and not row.of_value for row in self.rows):
            yield (
                "Where other work shares the machine, equal runs differ as well: train A again, "
                "and compare A with that run."
            )

    def to_json(self) -> dict[str, Any]:
        """For programs and the page; docs/json.md lists the keys."""
        return {
            "schema": SCHEMA,
            "a": self.before.title,
            "b": self.after.title,
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


def compare(before: Side, after: Side) -> Comparison:
    """All that both runs have."""
    first, first_used = _usual(before.cells)
    second, second_used = _usual(after.cells)
    others = before.conditions.keys() | after.conditions.keys()
    config = _differing(before.config, after.config)
    return Comparison(
        before,
        after,
        (first_used, second_used),
        [*step_rows(first, second), *special_rows(before, after), *value_rows(before, after)],
        _differing(before.conditions, after.conditions),
        [each for each in config if each.name not in others],
    )


def _differing(before: dict[str, str], after: dict[str, str]) -> list[Differing]:
    keys = dict.fromkeys((*before, *after))
    found = (Differing(key, before.get(key, "-"), after.get(key, "-")) for key in keys)
    return [each for each in found if each.a != each.b]


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


# -- as tables


class Table(NamedTuple):
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(found: Comparison) -> Iterator[Table]:
    """Of the steps and of the values, in words."""
    if steps := [_step_cells(row) for row in found.rows if not row.of_value]:
        yield Table(_HEADS, steps)
    if values := [_value_cells(row) for row in found.rows if row.of_value]:
        yield Table(_VALUE_HEADS, values)


def _step_cells(row: Row) -> list[str]:
    def show(value: float | None) -> str:
        return shown.seconds(value) if row.unit == "s" else shown.number(value)

    cells = [row.name, show(row.before), show(row.after), percent(row.change)]
    return [*cells, _p(row), row.verdict]


def _value_cells(row: Row) -> list[str]:
    cells = [row.shown, shown.number(row.before), shown.number(row.after), percent(row.change)]
    ends = map(shown.number, (*row.last, *row.best))
    return [*cells, f"{_p(row)} {row.verdict}".strip(), *ends]


def _p(row: Row) -> str:
    if row.p is None:
        return row.untested
    return "< 0.0001" if row.p < 1e-4 else f"{row.p:.2g}"
