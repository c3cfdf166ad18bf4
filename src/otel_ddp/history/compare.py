"""Compares two runs: which measures differ, and whether chance explains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
_SIGNIFICANT_P = 0.01
# A smaller relative change than this is not reported, however significant it is.
_LEAST_CHANGE = 0.01
# A phase is not reported if its change is a smaller share of the step time than this.
_LEAST_OF_STEP = 0.005
# Of the steps that both runs have made, only this last share is used to compare logged values.
_LAST_PART = 0.2

# The first steps are excluded: they fill caches, grow buffers, tune kernels.
_WARM_UP_SHARE, _FEWEST_WARM_UP, _MOST_WARM_UP = 0.05, 10, 500
_HEADS = ("per step", "A", "B", "change", "p", "")
_VALUE_HEADS = ("value, last part", "A", "B", "change", "p", "last A", "last B", "best A", "best B")
_CONDITIONS = "nodes gpus model backend precision strategy torch device_runtime"


# -- the runs


class Value(NamedTuple):
    """A logged value of one run."""

    name: str
    split: str
    direction: str
    """`min` if low values are better, `max` if high ones are; empty if unknown."""
    means: dict[int, float]
    last: float | None
    best: float | None


class Side(NamedTuple):
    """One of the two runs."""

    title: str
    conditions: dict[str, str]
    """Properties that affect the steps: number of ranks, versions, device."""
    config: dict[str, str]
    cells: list[Cell]
    values: list[Value]
    look: str = ""
    """A hint where to find the other ranks, if the history has only some; else empty."""


def load(words: str, folder: Path, *, paths: bool = True) -> Side:
    """Load a run by its name or path, with the arguments and errors of `find_run`."""
    with find_run(words, folder, paths=paths) as run:
        return of_run(run)


def of_run(run: WholeRun) -> Side:
    cells = run.cells()
    config = {str(key): str(value) for key, value in sorted(run.section("config").items())}
    environment = run.section("environment")
    conditions = {
        "ranks": str(run.world_size or len(run.ranks)),
        **{key: str(environment.get(key) or "") for key in _CONDITIONS.split()},
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
    best = plain.number(plain.mapping(summary.get(direction)).get("value"))
    means = {int(each.first): each.total / each.finite for each in buckets if each.finite}
    newest = max(buckets, key=lambda each: each.last_ns, default=None)
    last = None if newest is None else math.nan if newest.last is None else float(newest.last)
    return Value(name, split, direction, means, last, best)


# -- rows


class Row(NamedTuple):
    """One row of the comparison: a measure or a logged value of both runs."""

    name: str
    unit: str
    better: str
    before: float | None = None
    after: float | None = None
    p: float | None = None
    """The p value, corrected for multiple tests. None if there was no test, see `untested`."""
    untested: str = ""
    split: str = ""
    of_value: bool = False
    last: tuple[float | None, float | None] = (None, None)
    best: tuple[float | None, float | None] = (None, None)
    matters: bool = True
    """False if the change of a phase is a negligible share of the step."""

    @property
    def shown(self) -> str:
        return shown.name(self.name, self.split)

    @property
    def apart(self) -> float | None:
        """After minus before."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def change(self) -> float | None:
        """`apart` as a share of `before`; None if either is unknown or `before` is 0."""
        return self.apart / abs(self.before) if self.before and self.apart is not None else None

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `differs`, or empty if there is nothing to report."""
        significant = self.p is not None and self.p < _SIGNIFICANT_P
        changed = self.change is None or abs(self.change) >= _LEAST_CHANGE
        if not (significant and changed and self.matters):
            return ""
        if not self.better or self.apart is None:
            return "differs"
        return "better" if (self.apart < 0) == (self.better == "min") else "worse"


def _corrected(rows: Sequence[Row]) -> list[Row]:
    """The rows with p corrected for multiple tests."""
    adjusted = iter(blocks.holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else row._replace(p=next(adjusted)) for row in rows]


def _tested(
    row: Row, first: Sequence[float], second: Sequence[float], p: float | None, too_few: str
) -> Row:
    before, after = (fmean(each) if each else None for each in (first, second))
    return row._replace(before=before, after=after, p=p, untested=too_few if p is None else "")


# -- steps


def _measures(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """The values of each measure in all cells, by the name of the measure."""
    throughput = [cell.work / cell.took_s if cell.took_s else 0.0 for cell in cells]
    return {
        "step_time": [cell.took_s for cell in cells],
        "throughput": throughput,
        **{
            word: [cell.phases_s.get(word, 0.0) for cell in cells]
            for word in MEASURED_PHASES
            if word not in UNUSUAL_PHASES
        },
    }


def _step_rows(before: Sequence[Cell], after: Sequence[Cell]) -> list[Row]:
    """A row for each measure, over steps without compilation, checkpoint or evaluation."""
    rows, others = [], _measures(after)
    for name, first in _measures(before).items():
        second = others[name]
        if name == "throughput" and any(first) and any(second):
            # A few quick steps would dominate a mean of rates, so test the inverse: the time per
            # token or sample.
            inverse = ([1 / each if each else 0.0 for each in side] for side in (first, second))
            p = blocks.of_steps(*inverse)
            rows.append(_tested(Row(name, "1/s", "max"), first, second, p, "too few steps"))
        elif name == "step_time" or (name != "throughput" and (any(first) or any(second))):
            p = blocks.of_steps(first, second)
            row = _tested(Row(name, "s", "min"), first, second, p, "too few steps")
            step_s = (rows[0] if rows else row).before or 0.0
            rows.append(row._replace(matters=abs(row.apart or 0.0) >= _LEAST_OF_STEP * step_s))
    return _corrected(rows)


# -- values


def _value_rows(before: Side, after: Side) -> list[Row]:
    """A row for each value that both runs have logged."""
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
    too_few = f"only {few} value{'' if few == 1 else 's'} in the last part"
    means = [*first.values()], [*second.values()]
    p = blocks.of_values(*means)
    paired = [step for step in first if step in second]
    if 2 * len(paired) >= max(len(first), len(second)):
        p = blocks.of_pairs([first[step] for step in paired], [second[step] for step in paired])
    return _tested(row, *means, p, too_few)


# -- the comparison


class Used(NamedTuple):
    """How many steps of a run were compared, and how many were excluded."""

    used: int
    warm_up: int
    unusual: int
    pauses: int


class Differing(NamedTuple):
    """A setting that differs."""

    name: str
    a: str
    b: str


class Comparison(NamedTuple):
    """The result of comparing two runs."""

    before: Side
    after: Side
    used: tuple[Used, Used]
    rows: list[Row]
    conditions: list[Differing]
    """Differing properties that affect the step time even of equal code, such as the device."""
    config: list[Differing]

    @property
    def conclusion(self) -> str:
        """One sentence on what differs."""
        changes: dict[str, list[str]] = {"worse": [], "better": [], "differs": []}
        for row in self.rows:
            if row.verdict:
                changes[row.verdict].append(f"{row.shown} {percent(row.change)}")
        parts = [f"{verdict}: {', '.join(found)}" for verdict, found in changes.items() if found]
        tested = any(row.p is not None for row in self.rows)
        nothing = "no significant difference" if tested else "nothing could be tested"
        sentence = "; ".join(parts) or nothing
        return f"{sentence[0].upper()}{sentence[1:]}."

    def notes(self) -> Iterator[str]:
        """Notes on how the comparison was made."""
        words = ("to warm up", "unusual (checkpoint, ...)", "with a pause")
        for letter, used in zip("AB", self.used, strict=True):
            counts = zip(used[1:], words, strict=True)
            left = ", ".join(f"{count} {what}" for count, what in counts if count)
            yield f"{letter}: {used.used} steps{f', without {left}' if left else ''}."
        for letter, side in (("A", self.before), ("B", self.after)):
            if side.look:
                yield f"{letter}: {side.look}."
        yield (
            "Each p compares blocks of steps, corrected for several tests. Reported: p < "
            f"{_SIGNIFICANT_P:g} and a change of {_LEAST_CHANGE * 100:g} % or more."
        )
        if any(row.verdict and not row.of_value for row in self.rows):
            yield (
                "If other work shares the machine, equal runs differ as well: train A again, "
                "and compare A with that run."
            )

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON, for programs and the page. docs/json.md lists the keys."""
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
    return f"{round(share * 100, 1) + 0.0:+.1f} %"


def compare(before: Side, after: Side) -> Comparison:
    first, first_used = _usual(before.cells)
    second, second_used = _usual(after.cells)
    return Comparison(
        before,
        after,
        (first_used, second_used),
        [*_step_rows(first, second), *_value_rows(before, after)],
        _differing(before.conditions, after.conditions),
        _differing(before.config, after.config),
    )


def _differing(before: dict[str, str], after: dict[str, str]) -> list[Differing]:
    keys = dict.fromkeys((*before, *after))
    found = (Differing(key, before.get(key, "-"), after.get(key, "-")) for key in keys)
    return [each for each in found if each.a != each.b]


def _usual(cells: Sequence[Cell]) -> tuple[list[Cell], Used]:
    """The cells to compare, and the counts of excluded steps.

    Excluded are the warm-up, steps with an unusual phase such as a checkpoint, and pauses.
    """
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


def tables(found: Comparison) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """The table of steps and the table of values, unless empty. A table: column heads, and rows."""
    if steps := [_step_cells(row) for row in found.rows if not row.of_value]:
        yield _HEADS, steps
    if values := [_value_cells(row) for row in found.rows if row.of_value]:
        yield _VALUE_HEADS, values


def _step_cells(row: Row) -> list[str]:
    show = shown.seconds if row.unit == "s" else shown.number
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
