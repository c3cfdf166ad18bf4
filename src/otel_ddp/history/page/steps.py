"""Steps of all ranks in one grid: how long they took, by phase, own work and waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from otel_ddp.history.page.exchange import Question
from otel_ddp.history.reader import History, Series, rank_order
from otel_ddp.history.tables import STEP_COLUMNS
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import PHASE, PHASES

# Numbers of one matrix, rank by step.
_MOST_CELLS = 60_000
_MOST_COLUMNS = 4096
_FURTHEST = 2**62
_AT = {column: number for number, column in enumerate(STEP_COLUMNS)}
_WAIT = "comm_wait"

# As they are painted and called.
_SHOWN = [
    {
        "name": each.word,
        "colour": each.colour,
        "shown": each.shown if each.kind == "wait" else each.word,
    }
    for each in PHASE.values()
]

_Cells = Mapping[int, tuple[Any, ...]]


def grid(run: WholeRun, question: Question) -> dict[str, Any]:
    """Columns of equally many steps, the same for all ranks.

    A cell without a step is null. `mean` is over all ranks that were asked for, weighed by steps.
    """
    found = [(each, series) for each in run.histories for series in each.step_series.values()]
    found.sort(key=lambda one: rank_order(one[1].key.rank))
    chosen = [one for one in found if question.text("rank") in ("", one[1].key.rank)]
    ranges = [span for each, series in chosen if (span := each.step_range(series)) is not None]
    if not ranges:
        return {"ranks": [], "columns": {}, "wide": 1, "phases": _SHOWN}
    lowest, highest = min(one for one, _ in ranges), max(last for _, last in ranges)
    first = max(question.whole("first", lowest, -_FURTHEST, _FURTHEST), lowest)
    until = min(question.whole("until", highest, -_FURTHEST, _FURTHEST), highest)
    most = min(question.whole("columns", 400, 2, _MOST_COLUMNS), max(_MOST_CELLS // len(chosen), 2))
    wide = _width(chosen, first, until, most)
    cells = {
        series.key.rank: history.wide_steps(series, wide, first, until)
        for history, series in chosen
    }
    numbers = range(first // wide, until // wide + 1) if until >= first else range(0)
    return {
        "wide": wide,
        "phases": _SHOWN,
        "columns": _mean(cells, numbers, wide),
        "ranks": [
            {
                "rank": series.key.rank,
                "node": str(history.about.get("node") or ""),
                "clock": series.key.name,
                "columns": _of_rank(cells[series.key.rank], numbers, wide),
            }
            for history, series in chosen
        ],
    }


def _width(chosen: list[tuple[History, Series]], first: int, until: int, most: int) -> int:
    """How many steps a column has: a multiple of what is kept, so that no bucket is cut."""
    kept = math.lcm(*(series.width for _, series in chosen))
    return kept * max(math.ceil((until - first + 1) / most / kept), 1)


def _of_rank(cells: _Cells, numbers: range, wide: int) -> dict[str, list[Any]]:
    rows = [cells.get(number) for number in numbers]

    def per_step(column: str) -> list[float | None]:
        at = _AT[column]
        return [_seconds(row[at], row[_AT["steps"]]) if row else None for row in rows]

    def ends(column: str) -> list[int]:
        pairs = zip(numbers, rows, strict=True)
        return [row[_AT[column]] if row else number * wide for number, row in pairs]

    waits = per_step(f"{_WAIT}_ns")
    took = per_step("took_ns")
    return {
        "first": ends("first"),
        "x": ends("until"),
        "ms": [row[_AT["last_ns"]] // 1_000_000 if row else None for row in rows],
        "steps": [row[_AT["steps"]] if row else 0 for row in rows],
        "step_s": took,
        "low_s": [row[_AT["low_ns"]] / 1e9 if row else None for row in rows],
        "high_s": [row[_AT["high_ns"]] / 1e9 if row else None for row in rows],
        "work_s": [
            None if all_s is None or wait_s is None else round(all_s - wait_s, 9)
            for all_s, wait_s in zip(took, waits, strict=True)
        ],
        "wait_s": waits,
    }


def _seconds(total_ns: int, steps: int) -> float:
    """Of one step. Digits below a nanosecond are not known, and would double the answer."""
    return round(total_ns / steps / 1e9, 9)


def _mean(of_rank: Mapping[str, _Cells], numbers: range, wide: int) -> dict[str, list[Any]]:
    """The phases of a step, over all ranks."""
    found: dict[str, list[Any]] = {name: [] for name in ("first", "x", "ms", "steps", "step_s")}
    phases: dict[str, list[Any]] = {phase: [] for phase in PHASES}
    for number in numbers:
        rows = [cells[number] for cells in of_rank.values() if number in cells]
        steps = sum(row[_AT["steps"]] for row in rows)
        found["first"].append(min((row[_AT["first"]] for row in rows), default=number * wide))
        found["x"].append(max((row[_AT["until"]] for row in rows), default=number * wide))
        last_ns = max((row[_AT["last_ns"]] for row in rows), default=None)
        found["ms"].append(None if last_ns is None else last_ns // 1_000_000)
        found["steps"].append(steps)

        def per_step(column: str, rows: list[Any] = rows, steps: int = steps) -> float | None:
            return _seconds(sum(row[_AT[column]] for row in rows), steps) if steps else None

        found["step_s"].append(per_step("took_ns"))
        for phase, into in phases.items():
            into.append(per_step(f"{phase}_ns"))
    return {**found, **phases}
