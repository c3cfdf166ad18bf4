"""Values, samples of the node and steps of ranks, as columns of numbers in as many as wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

from otel_ddp.history.page.exchange import Question
from otel_ddp.history.reader import Bucket, History, Series
from otel_ddp.history.tables import STEP_COLUMNS, SeriesKey
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import MEASURED_PHASES, PHASE

_MOST_COLUMNS = 4096
_MOST_NAMES, _MOST_SERIES = 20, 200
# Numbers of one matrix, rank by step.
_MOST_CELLS = 60_000
_FURTHEST = 2**62
_METRICS = {metric.name: metric for metric in catalog.METRICS}
_AT = {column: number for number, column in enumerate(STEP_COLUMNS)}
# Phases as they are painted and called.
_SHOWN = [
    {
        "name": each.word,
        "colour": each.colour,
        "shown": each.shown if each.kind == "wait" else each.word,
    }
    for each in map(PHASE.__getitem__, MEASURED_PHASES)
]
# Of a series, what no label may take the name of.
_TAKEN = ("run", "name", "rank", "node", "columns")

# Of each rank, by columns of steps.
_OF_RANK = ("first", "x", "ms", "steps", "low_s", "high_s", "step_s", "work_s", "wait_s")

_Cells = Mapping[int, tuple[Any, ...]]


# -- values and samples


def names(run: WholeRun, *kinds: str) -> list[str]:
    """Of all nodes, each once."""
    found = (each.names(kind) for kind in kinds for each in run.histories)
    return list(dict.fromkeys(chain.from_iterable(found)))


def described(name: str) -> dict[str, str]:
    """A metric, with the unit and the sentence of the catalogue."""
    metric = _METRICS.get(name)
    unit, text = (metric.unit, metric.description) if metric else ("", "")
    return {"name": name, "unit": unit, "text": text}


def columns_of(run: WholeRun, question: Question, *kinds: str) -> dict[str, Any]:
    """The series of the names that were asked for, and how many were left out."""
    first = question.whole("first", -_FURTHEST, -_FURTHEST, _FURTHEST)
    until = question.whole("until", _FURTHEST, -_FURTHEST, _FURTHEST)
    wanted = question.whole("columns", 400, 2, _MOST_COLUMNS)
    rank, left_out = question.text("rank"), 0
    found: list[dict[str, Any]] = []
    # Of a rank that has moved: from where on its newest node has each series.
    begins: dict[SeriesKey, int] = {}
    for name in question.texts("name")[:_MOST_NAMES]:
        for history, series in _named(run, name, kinds):
            if rank and series.key.rank not in ("", rank):
                continue
            if len(found) >= _MOST_SERIES:
                left_out += 1
                continue
            labels = dict(series.key.labels)
            buckets = history.sums(series, first, until)
            if series.key.kind == "value":
                before = begins.get(series.key, _FURTHEST)
                buckets = [each for each in buckets if each.until < before]
                begins[series.key] = min([before, *(each.first for each in buckets)])
            buckets = _thinned(buckets, wanted)
            columns = _rates(buckets) if series.key.kind == "counter" else _as_columns(buckets)
            found.append(
                {
                    "name": name,
                    "rank": series.key.rank,
                    "node": labels.pop("node", "") or run.node_of(history, series.key.rank),
                    **{key: word for key, word in labels.items() if key not in _TAKEN},
                    "columns": columns,
                }
            )
    return {"series": found, "left_out": left_out}


def _named(run: WholeRun, name: str, kinds: tuple[str, ...]) -> Iterator[tuple[History, Series]]:
    for kind in kinds:
        yield from run.by_rank((each, s) for each in run.histories for s in each.series(kind, name))


def _thinned(buckets: list[Bucket], most: int) -> list[Bucket]:
    """The same values in no more than *most* buckets: neighbours become one."""
    many = math.ceil(len(buckets) / most)
    if many <= 1:
        return buckets
    return [_joined(buckets[at : at + many]) for at in range(0, len(buckets), many)]


def _joined(parts: list[Bucket]) -> Bucket:
    latest = parts[-1]
    return Bucket(
        start=parts[0].start,
        first=min(each.first for each in parts),
        until=max(each.until for each in parts),
        first_ns=min(each.first_ns for each in parts),
        last_ns=max(each.last_ns for each in parts),
        finite=sum(each.finite for each in parts),
        total=math.fsum(each.total for each in parts),
        low=min((each.low for each in parts if each.low is not None), default=None),
        high=max((each.high for each in parts if each.high is not None), default=None),
        last=latest.last,
        nonfinite=sum(each.nonfinite for each in parts),
        epoch=latest.epoch,
    )


def _as_columns(buckets: list[Bucket]) -> dict[str, list[Any]]:
    """`ms` are milliseconds since 1970, as browsers count."""
    return {
        "first": [each.first for each in buckets],
        "x": [each.until for each in buckets],
        "ms": [each.last_ns // 1_000_000 for each in buckets],
        "epoch": [each.epoch for each in buckets],
        "last": [each.last for each in buckets],
        "low": [each.low for each in buckets],
        "high": [each.high for each in buckets],
        "mean": [each.total / each.finite if each.finite else None for each in buckets],
        "values": [each.finite + each.nonfinite for each in buckets],
        "not_finite": [each.nonfinite for each in buckets],
    }


def _rates(buckets: list[Bucket]) -> dict[str, list[Any]]:
    """What a counter grew by, each second. A counter that began anew has no rate there."""
    found: dict[str, list[Any]] = {"first": [], "x": [], "ms": [], "per_second": []}
    for one, other in pairwise(buckets):
        if one.last is not None and other.last is not None and other.last_ns > one.last_ns:
            rate = (other.last - one.last) / (other.last_ns - one.last_ns) * 1e9
            row = one.until, other.until, other.last_ns // 1_000_000, rate if rate >= 0 else None
            for column, value in zip(found.values(), row, strict=True):
                column.append(value)
    return found


# -- steps


def grid(run: WholeRun, question: Question) -> dict[str, Any]:
    """Columns of equally many steps, the same for all ranks.

    A cell without a step is null. `mean` is over all ranks that were asked for, weighed by steps.
    """
    chosen = [one for one in run.step_series() if question.text("rank") in ("", one[1].key.rank)]
    ranges = [span for each, series in chosen if (span := each.step_range(series)) is not None]
    if not ranges:
        return {"ranks": [], "columns": {}, "wide": 1, "phases": _SHOWN}
    lowest, highest = min(one for one, _ in ranges), max(last for _, last in ranges)
    first = max(question.whole("first", lowest, -_FURTHEST, _FURTHEST), lowest)
    until = min(question.whole("until", highest, -_FURTHEST, _FURTHEST), highest)
    most = min(question.whole("columns", 400, 2, _MOST_COLUMNS), max(_MOST_CELLS // len(chosen), 2))
    wide = _width(chosen, first, until, most)
    cells: dict[str, _Cells] = {}
    newest: dict[str, tuple[History, Series]] = {}
    for history, series in chosen:
        rank, found = series.key.rank, history.wide_steps(series, wide, first, until)
        newest.setdefault(rank, (history, series))
        # Of a rank that has moved.
        later = cells.get(rank, {})
        before = min(later, default=math.inf)
        cells[rank] = {**{at: row for at, row in found.items() if at < before}, **later}
    numbers = range(first // wide, until // wide + 1) if until >= first else range(0)
    return {
        "wide": wide,
        "phases": _SHOWN,
        "columns": _mean(cells, numbers, wide),
        "ranks": [
            {
                "rank": series.key.rank,
                "node": run.node_of(history, series.key.rank),
                "clock": series.key.name,
                "columns": _of_rank(cells[series.key.rank], numbers, wide),
            }
            for history, series in newest.values()
        ],
    }


def _width(chosen: list[tuple[History, Series]], first: int, until: int, most: int) -> int:
    """How many steps a column has: a multiple of what is kept, so that no bucket is cut."""
    kept = math.lcm(*(series.width for _, series in chosen))
    return kept * max(math.ceil((until - first + 1) / most / kept), 1)


def _of_rank(cells: _Cells, numbers: range, wide: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in _OF_RANK}
    for number in numbers:
        at = number * wide
        values: tuple[Any, ...] = (at, at, None, 0, *[None] * 5)
        if (row := cells.get(number)) and row[_AT["steps"]]:
            # In the order of STEP_COLUMNS.
            first, until, _, last_ns, steps, took_ns, low_ns, high_ns = row[:8]
            wait_ns = row[_AT["comm_wait_ns"]]
            each_s = (_seconds(ns, steps) for ns in (took_ns, took_ns - wait_ns, wait_ns))
            ends_s = low_ns / 1e9, high_ns / 1e9
            values = (first, until, last_ns // 1_000_000, steps, *ends_s, *each_s)
        for column, value in zip(found.values(), values, strict=True):
            column.append(value)
    return found


def _seconds(total_ns: int, steps: int) -> float:
    """Of one step. Digits below a nanosecond are not known, and would double the answer."""
    return round(total_ns / steps / 1e9, 9)


def _mean(of_rank: Mapping[str, _Cells], numbers: range, wide: int) -> dict[str, list[Any]]:
    """The phases of a step, over all ranks."""
    found: dict[str, list[Any]] = {name: [] for name in ("first", "x", "ms", "steps", "step_s")}
    phases: dict[str, list[Any]] = {phase: [] for phase in MEASURED_PHASES}
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
