"""One side of a comparison: the steps and the values of a run, out of its histories."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from otel_ddp.history.directory import NotFound, find_run
from otel_ddp.history.reader import Bucket
from otel_ddp.history.whole_run import Cell, WholeRun

_BATCH = re.compile(r"batch|accumul", re.IGNORECASE)
_CONDITIONS = ("nodes", "gpus", "model", "backend", "precision", "strategy", "torch", "cuda")


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


def load(words: str, folder: Path, *, ours: bool = False) -> list[Side]:
    """One run by the words of a user, or several with commas between; *ours* as in find_run.

    Raises NotFound or reader.Unreadable.
    """
    several = "," in words and not Path(words).expanduser().exists()
    named = [each.strip() for each in words.split(",") if each.strip()] if several else [words]
    if not named:
        raise NotFound(f"{words!r} names no run: give one, or several with commas between.")
    sides = []
    for each in named:
        with find_run(each, folder, ours=ours) as run:
            sides.append(of_run(run))
    return sides


def of_run(run: WholeRun) -> Side:
    cells = run.cells()
    config = {
        str(key): str(value) for key, value in sorted((run.about.get("config") or {}).items())
    }
    environment = run.about.get("environment") or {}
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
    )


def _value(run: WholeRun, name: str, split: str, buckets: Sequence[Bucket]) -> Value:
    own = (row for row in run.summary if (row.get("name"), row.get("split")) == (name, split))
    summary = next(own, {})
    direction = str(summary.get("direction") or "")
    point = summary.get(direction)
    best = point.get("value") if isinstance(point, dict) else None
    newest = max(buckets, key=lambda each: each.last_ns, default=None)
    return Value(
        *(name, split, direction),
        {int(each.first): each.total / each.finite for each in buckets if each.finite},
        None if newest is None or newest.last is None else float(newest.last),
        None if best is None else float(best),
    )
