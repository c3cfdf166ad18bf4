"""One side of a comparison: the steps and the values of a run, out of a history or a report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.history.directory import NotFound, find_run
from otel_ddp.history.reader import Bucket
from otel_ddp.history.whole_run import Cell, WholeRun, neighbours

FORMAT, VERSION = "otel_ddp report", 1
"""How a report calls itself."""
_LARGEST_REPORT = 256 * 1024 * 1024
# Beyond it neighbours are put together: a comparison does not get better by more.
_MOST_POINTS = 2048
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


class Side(NamedTuple):
    """A run as far as it is compared."""

    title: str
    conditions: dict[str, str]
    """Under which its steps were made: number of ranks, batch, device."""
    config: dict[str, str]
    cells: list[Cell]
    values: list[Value]

    def value(self, name: str, split: str) -> Value | None:
        found = (each for each in self.values if (each.name, each.split) == (name, split))
        return next(found, None)


def of_run(run: WholeRun) -> Side:
    """From the histories of a run."""
    cells = run.cells()
    return Side(
        f"{run.group}/{run.name}" if run.group else run.name,
        _conditions(run, cells),
        {str(key): str(value) for key, value in sorted((run.about.get("config") or {}).items())},
        cells,
        [_value(run, *key, buckets) for key, buckets in run.values.items()],
    )


def _conditions(run: WholeRun, cells: Sequence[Cell]) -> dict[str, str]:
    environment = run.about.get("environment") or {}
    found = {"ranks": str(run.world_size or len(run.ranks))}
    found |= {key: str(environment[key]) for key in _CONDITIONS if environment.get(key)}
    if "gpus" not in found:
        found["gpus"] = _boards(run)
    for key, value in sorted((run.about.get("config") or {}).items()):
        if _BATCH.search(str(key)):
            found[str(key)] = str(value)
    if work := [each.work for each in cells if each.work]:
        found["work a step"] = f"{sorted(work)[len(work) // 2]:.6g}"
    found["clock"] = ", ".join(sorted({clock for clock, _, _ in run.step_buckets.values()}))
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
    summary = next((each for each in run.summary if _key(each) == (name, split)), {})
    direction = str(summary.get("direction") or "")
    best = None
    if direction and finite:
        choose, ends = (min, "low") if direction == "min" else (max, "high")
        best = choose(end for each in finite if (end := getattr(each, ends)) is not None)
        if isinstance(point := summary.get(direction), dict) and point.get("value") is not None:
            best = point["value"]
    newest = max(buckets, key=lambda each: each.last_ns, default=None)
    return Value(
        *(name, split, direction),
        [int(each.first) for each in finite],
        [each.total / each.finite for each in finite],
        None if newest is None or newest.last is None else float(newest.last),
        None if best is None else float(best),
    )


def _key(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get("name"), row.get("split")


# -- in a report


_COLUMNS: Mapping[str, Callable[[Any], Any]] = {
    "first": int,
    "steps": float,
    "took_s": float,
    "work": float,
    "usual": bool,
}


def to_json(side: Side) -> dict[str, Any]:
    """What of_json() reads; docs/report.md describes it."""
    cells = _thinned(side.cells)
    words = [word for word in (cells[0].phases_s if cells else ()) if _has(cells, word)]
    return {
        "title": side.title,
        "conditions": side.conditions,
        "config": side.config,
        "steps": {
            **{name: [_short(getattr(each, name)) for each in cells] for name in _COLUMNS},
            "phases_s": {word: [_short(each.phases_s[word]) for each in cells] for word in words},
        },
        "values": [_thin_value(each)._asdict() for each in side.values],
    }


def _has(cells: Sequence[Cell], word: str) -> bool:
    return any(each.phases_s[word] for each in cells)


def _short(number: Any) -> Any:
    return round(number, 9) if isinstance(number, float) else number


def _thinned(cells: Sequence[Cell]) -> list[Cell]:
    """Neighbours put together until no more than _MOST_POINTS are left."""
    by = math.ceil(len(cells) / _MOST_POINTS) or 1
    return [_together(cells[at : at + by]) for at in range(0, len(cells), by)]


def _together(cells: Sequence[Cell]) -> Cell:
    # Of steps that are not like the others nothing is mixed into those that are.
    same = [each for each in cells if each.usual] or list(cells)
    return neighbours(same)


def _thin_value(value: Value) -> Value:
    by = math.ceil(len(value.steps) / _MOST_POINTS) or 1
    groups = [value.means[at : at + by] for at in range(0, len(value.means), by)]
    return value._replace(steps=value.steps[::by], means=[sum(each) / len(each) for each in groups])


def of_json(content: Mapping[str, Any]) -> Side:
    """The side that to_json() has written; raises what damaged content does."""
    steps = content["steps"]
    phases = {word: list(map(float, column)) for word, column in steps["phases_s"].items()}
    columns = [map(kind, steps[name]) for name, kind in _COLUMNS.items()]
    return Side(
        str(content["title"]),
        {str(key): str(text) for key, text in content["conditions"].items()},
        {str(key): str(text) for key, text in content["config"].items()},
        [
            Cell._make((*row, {word: column[at] for word, column in phases.items()}))
            for at, row in enumerate(zip(*columns, strict=True))
        ],
        [
            Value(
                *(str(each["name"]), str(each["split"]), str(each["direction"])),
                [int(step) for step in each["steps"]],
                [float(mean) for mean in each["means"]],
                *(each["last"], each["best"]),
            )
            for each in content["values"]
        ],
    )


# -- by the words of a user


def load(words: str, folder: Path, *, ours: bool = False) -> list[Side]:
    """One run, or several with commas between them; *ours* as in find_run.

    Raises NotFound or reader.Unreadable.
    """
    if "," not in words or Path(words).expanduser().exists():
        return [_load(words, folder, ours)]
    named = [each.strip() for each in words.split(",") if each.strip()]
    if not named:
        raise NotFound(f"{words!r} names no run: give one, or several with commas between.")
    return [_load(each, folder, ours) for each in named]


def _load(words: str, folder: Path, ours: bool) -> Side:
    path = Path(words).expanduser()
    if path.is_dir() and (path / "report.json").is_file() and not any(path.glob("*.sqlite")):
        path /= "report.json"
    if path.suffix == ".json" and path.is_file():
        return _of_report(path)
    with find_run(words, folder, ours=ours) as run:
        return of_run(run)


def _refuse(constant: str) -> None:
    # Reports have null there; an infinite number of steps has no mean.
    raise ValueError(f"{constant} is no number of a report")


def _of_report(path: Path) -> Side:
    try:
        if path.stat().st_size > _LARGEST_REPORT:
            raise NotFound(f"{path} is too large for a report.")
        content: Any = files.parse_json(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise NotFound(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise NotFound(f"{path} is no report of `otel-ddp report`.")
    if content.get("version") != VERSION:
        raise NotFound(
            f"{path} is of version {content.get('version')!r}; this otel-ddp reads {VERSION}."
        )
    try:
        return of_json(content["compared"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise NotFound(f"{path} is damaged: {error!r}") from error
