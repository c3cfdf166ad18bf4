"""Downsamples logged values, node samples and steps to the requested number of points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

from otel_ddp.history.buckets import FAR, FIRST, VALUES, Bucket, Row, StepBucket
from otel_ddp.history.newest_attempt import rank_order
from otel_ddp.history.page.http import Question
from otel_ddp.history.reader import History, Series
from otel_ddp.history.tables import SeriesKey
from otel_ddp.history.whole_run import WholeRun, column_width
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import MEASURED_PHASES, PHASE

_MOST_COLUMNS = 4096
_MOST_NAMES, _MOST_SERIES = 20, 200
# Limit of the answer on steps: the number of ranks times the number of columns.
_MOST_CELLS = 60_000
# How the page shows each phase: its colour and its name.
SHOWN_PHASES = [
    {
        "name": each.word,
        "colour": each.colour,
        "shown": each.shown if each.kind == "wait" else each.word,
    }
    for each in map(PHASE.__getitem__, MEASURED_PHASES)
]
# Keys in the JSON of a series. A label with such a name is left out, so that it overrides none.
_TAKEN = ("run", "name", "rank", "node", "columns")


# -- values and samples


def names(run: WholeRun, *kinds: str) -> list[str]:
    """The names of the series of these kinds, on all nodes."""
    found = (each.names(kind) for kind in kinds for each in run.histories)
    return list(dict.fromkeys(chain.from_iterable(found)))


def described(name: str) -> dict[str, str]:
    """A metric with its unit and description."""
    metric = catalog.BY_NAME.get(name)
    unit, text = (metric.unit, metric.description) if metric else ("", "")
    return {"name": name, "unit": unit, "text": text}


def columns_of(run: WholeRun, question: Question, *kinds: str) -> dict[str, Any]:
    """The series of the requested names; `left_out` is the number of series beyond the limit."""
    first = question.whole("first", -FAR, -FAR, FAR)
    until = question.whole("until", FAR, -FAR, FAR)
    wanted = question.whole("columns", 400, 2, _MOST_COLUMNS)
    rank, left_out = question.text("rank"), 0
    found: list[dict[str, Any]] = []
    if question.text("over") == "ranks" and not rank:
        for name in question.texts("name")[:_MOST_NAMES]:
            found += _over_ranks(run, name, kinds, (wanted, first, until))
        return {"series": found, "left_out": 0}
    # A rank that moved to another node has a series on each node, the newest first. From an older
    # series, use only the steps before the first step of the newer one, which `begins` has.
    begins: dict[SeriesKey, int] = {}
    for name in question.texts("name")[:_MOST_NAMES]:
        for history, series in _named(run, name, kinds):
            if rank and series.key.rank not in ("", rank):
                continue
            if len(found) >= _MOST_SERIES:
                left_out += 1
                continue
            labels = dict(series.key.labels)
            before = begins.get(series.key, FAR)
            buckets = history.sums(series, first, until, wanted, before)
            if buckets and series.key.kind == "value":
                begins[series.key] = buckets[0].first
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


def _over_ranks(
    run: WholeRun, name: str, kinds: tuple[str, ...], how: tuple[int, int, int]
) -> list[dict[str, Any]]:
    """One series for each set of labels, with the mean, lowest and highest value of the ranks."""
    alike: dict[tuple[tuple[str, str], ...], list[tuple[History, Series]]] = {}
    for one in _named(run, name, kinds):
        alike.setdefault(one[1].key.labels, []).append(one)
    wanted, first, until = how
    found = []
    for labels, of_ranks in alike.items():
        ranks = {one.key.rank for _, one in of_ranks}
        whole = [each.columns(series, first, until) for each, series in of_ranks]
        steps = [step for each in whole for step in (*each[FIRST][:1], *each[FIRST][-1:])]
        wide = column_width(of_ranks, min(steps, default=0), max(steps, default=0), wanted)
        cells: dict[int, list[Row]] = {}
        for each in whole:
            for at, row in VALUES.sum_up(each, wide).items():
                cells.setdefault(at, []).append(row)
        buckets = [Bucket.of(VALUES.together(cells[at])) for at in sorted(cells)]
        means = [each.total / each.finite if each.finite else None for each in buckets]
        about = {"name": name, "rank": min(ranks, key=rank_order), "ranks": len(ranks)}
        found.append({**dict(labels), **about, "columns": {**_as_columns(buckets), "last": means}})
    return found


def _named(run: WholeRun, name: str, kinds: tuple[str, ...]) -> Iterator[tuple[History, Series]]:
    for kind in kinds:
        yield from run.by_rank((each, s) for each in run.histories for s in each.series(kind, name))


def _as_columns(buckets: list[Bucket]) -> dict[str, list[Any]]:
    """Buckets as columns. `ms`: milliseconds since 1970, as in JavaScript."""
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
    """The rates of a counter per second. None where the counter fell, i.e. was reset."""
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
    """The mean step times over the requested ranks, in columns of equal numbers of steps."""
    chosen = [one for one in run.step_series() if question.text("rank") in ("", one[1].key.rank)]
    ranges = [span for each, series in chosen if (span := each.step_range(series)) is not None]
    if not ranges:
        return {"columns": {}, "wide": 1, "phases": SHOWN_PHASES}
    lowest, highest = min(one for one, _ in ranges), max(last for _, last in ranges)
    bounds = (("first", lowest), ("until", highest))
    first, until = (
        question.whole(name, bound + run.shift, -FAR, FAR) - run.shift for name, bound in bounds
    )
    first, until = max(first, lowest), min(until, highest)
    most = min(question.whole("columns", 400, 2, _MOST_COLUMNS), max(_MOST_CELLS // len(chosen), 2))
    wide = column_width(chosen, first, until, most)
    cells = run.steps(wide, first, until, question.text("rank"))
    numbers = range(first // wide, until // wide + 1) if until >= first else range(0)
    return {
        "wide": wide,
        "phases": SHOWN_PHASES,
        "columns": _mean(cells, numbers, wide, run.shift),
        "many": {
            "ranks": len({series.key.rank for _, series in chosen}),
            "by_device": any(series.key.name == "device" for _, series in chosen),
        },
    }


def _seconds(total_ns: int, steps: int) -> float:
    """The mean per step, rounded to nanoseconds to shorten the answer."""
    return round(total_ns / steps / 1e9, 9)


def _mean(
    cells: Mapping[int, StepBucket], numbers: range, wide: int, shift: int
) -> dict[str, list[Any]]:
    """The mean duration of a step and of its phases in each column."""
    names = ("first", "x", "ms", "steps", "step_s", "low_s", "high_s")
    found: dict[str, list[Any]] = {name: [] for name in (*names, *MEASURED_PHASES)}
    for number in numbers:
        cell = cells.get(number)
        at = number * wide + shift
        row: list[Any] = [at, at, None, 0, *[None] * (3 + len(MEASURED_PHASES))]
        if cell is not None:
            row = [cell.first + shift, cell.until + shift, cell.last_ns // 1_000_000, cell.steps]
            row += [_seconds(cell.took_ns, cell.steps), cell.low_ns / 1e9, cell.high_ns / 1e9]
            row += [_seconds(ns, cell.steps) for ns in cell.phases_ns.values()]
        for column, value in zip(found.values(), row, strict=True):
            column.append(value)
    return found
