"""One side of a comparison: the steps and the values of a run, from wherever they come."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.history.group_steps import Cell, group_cells
from otel_ddp.history.reader import Bucket
from otel_ddp.history.whole_run import WholeRun

# Beyond it neighbours are put together: a comparison does not get better by more.
MOST_POINTS = 2048
_BATCH = re.compile(r"batch|accumul", re.IGNORECASE)
_CONDITIONS = ("nodes", "gpus", "model", "backend", "precision", "strategy", "torch", "cuda")


class Value(NamedTuple):
    """A logged value: the means of its buckets, each with its first step."""

    name: str
    split: str
    direction: str
    """Where its best value lies: `min`, `max`, or empty."""
    steps: list[int]
    means: list[float]
    last: float | None
    best: float | None
    best_step: int | None

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.split})" if self.split else self.name


class Side(NamedTuple):
    """A run as far as it is compared."""

    title: str
    conditions: dict[str, str]
    """Under which its steps were made: number of ranks, batch, device."""
    config: dict[str, str]
    cells: list[Cell]
    values: list[Value]


def of_run(run: WholeRun) -> Side:
    """From the histories of a run."""
    ranks = run.step_buckets()
    cells = group_cells(ranks)
    return Side(
        f"{run.group}/{run.name}" if run.group else run.name,
        _conditions(run, cells, {clock for clock, _, _ in ranks.values()}),
        {str(key): str(value) for key, value in sorted((run.about.get("config") or {}).items())},
        cells,
        [_value(run, *key, buckets) for key, buckets in run.values().items()],
    )


def _conditions(run: WholeRun, cells: Sequence[Cell], clocks: set[str]) -> dict[str, str]:
    environment = run.about.get("environment") or {}
    sizes = [
        environment.get("world_size"),
        *(each.get("world_size") for each in run.ranks.values()),
    ]
    found = {"ranks": next((str(size) for size in sizes if size), str(len(run.ranks)))}
    found |= {key: str(environment[key]) for key in _CONDITIONS if environment.get(key)}
    if "gpus" not in found:
        found["gpus"] = _boards(run)
    for key, value in sorted((run.about.get("config") or {}).items()):
        if _BATCH.search(str(key)):
            found[str(key)] = str(value)
    if work := [each.work for each in cells if each.work]:
        found["work a step"] = f"{sorted(work)[len(work) // 2]:.6g}"
    found["clock"] = ", ".join(sorted(clocks))
    return {key: value for key, value in found.items() if value}


def _boards(run: WholeRun) -> str:
    names = [
        labels["hw.model"]
        for _, series in run.series("node")
        if (labels := dict(series.key.labels)).get("hw.model")
        and series.key.name.startswith("hw.gpu.utilization")
    ]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def _value(run: WholeRun, name: str, split: str, buckets: Sequence[Bucket]) -> Value:
    finite = [each for each in buckets if each.finite]
    summary = _summary_row(run, name, split)
    direction = str(summary.get("direction") or "")
    lows = [(each.low, each.first) for each in finite if each.low is not None]
    highs = [(each.high, each.first) for each in finite if each.high is not None]
    best, best_step = None, None
    if direction and finite:
        best, best_step = min(lows) if direction == "min" else max(highs, key=lambda high: high[0])
        if isinstance(point := summary.get(direction), dict) and point.get("value") is not None:
            best, best_step = point["value"], point.get("step")
    newest = max(buckets, key=lambda each: each.last_ns, default=None)
    return Value(
        *(name, split, direction),
        [int(each.first) for each in finite],
        [each.total / each.finite for each in finite],
        None if newest is None or newest.last is None else float(newest.last),
        *(None if best is None else float(best), best_step),
    )


def _summary_row(run: WholeRun, name: str, split: str) -> Mapping[str, Any]:
    for row in run.about.get("summary") or ():
        if isinstance(row, dict) and (row.get("name"), row.get("split")) == (name, split):
            return row
    return {}


# -- as JSON


def to_json(side: Side) -> dict[str, Any]:
    """What of_json() reads; docs/report.md describes it."""
    cells = thinned(side.cells)
    return {
        "title": side.title,
        "conditions": side.conditions,
        "config": side.config,
        "steps": {
            "first": [each.first for each in cells],
            "steps": [each.steps for each in cells],
            "took_s": [_short(each.took_s) for each in cells],
            "work": [each.work for each in cells],
            "usual": [each.usual for each in cells],
            "began_ns": [each.began_ns for each in cells],
            "phases_s": {
                word: [_short(each.phases_s[word]) for each in cells]
                for word in (cells[0].phases_s if cells else ())
                if any(each.phases_s[word] for each in cells)
            },
        },
        "values": [_thin_value(each)._asdict() for each in side.values],
    }


def of_json(content: Mapping[str, Any]) -> Side:
    """The side that to_json() has written; raises KeyError, TypeError or ValueError."""
    steps = content["steps"]
    phases = {word: list(map(float, column)) for word, column in steps["phases_s"].items()}
    cells = [
        Cell(
            int(first),
            float(count),
            float(took_s),
            float(work),
            bool(usual),
            {word: column[at] for word, column in phases.items()},
            int(began_ns),
        )
        for at, (first, count, took_s, work, usual, began_ns) in enumerate(
            zip(
                *(steps["first"], steps["steps"], steps["took_s"], steps["work"]),
                *(steps["usual"], steps["began_ns"]),
                strict=True,
            )
        )
    ]
    return Side(
        str(content["title"]),
        {str(key): str(text) for key, text in content["conditions"].items()},
        {str(key): str(text) for key, text in content["config"].items()},
        cells,
        [
            Value(
                *(str(each["name"]), str(each["split"]), str(each["direction"])),
                [int(step) for step in each["steps"]],
                [float(mean) for mean in each["means"]],
                *(each["last"], each["best"], each["best_step"]),
            )
            for each in content["values"]
        ],
    )


def thinned(cells: Sequence[Cell], most: int = MOST_POINTS) -> list[Cell]:
    """Neighbours put together until no more than *most* are left."""
    by = math.ceil(len(cells) / most) if cells else 1
    if by == 1:
        return list(cells)
    return [_together(cells[at : at + by]) for at in range(0, len(cells), by)]


def _together(cells: Sequence[Cell]) -> Cell:
    # Of steps that are not like the others nothing is mixed into those that are.
    same = [each for each in cells if each.usual] or list(cells)
    steps = sum(each.steps for each in same) or 1
    return Cell(
        same[0].first,
        steps,
        sum(each.took_s * each.steps for each in same) / steps,
        sum(each.work * each.steps for each in same) / steps,
        same[0].usual,
        {
            word: sum(each.phases_s.get(word, 0.0) * each.steps for each in same) / steps
            for word in same[0].phases_s
        },
        same[0].began_ns,
    )


def _thin_value(value: Value) -> Value:
    by = math.ceil(len(value.steps) / MOST_POINTS) if value.steps else 1
    groups = [value.means[at : at + by] for at in range(0, len(value.means), by)]
    return value._replace(steps=value.steps[::by], means=[sum(each) / len(each) for each in groups])


def _short(seconds: float) -> float:
    return round(seconds, 9)
