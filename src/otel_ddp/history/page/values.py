"""Logged values and samples of the node, as columns of numbers in as many buckets as wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from otel_ddp.history.page.exchange import Question
from otel_ddp.history.reader import Bucket, History, Series
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary import catalog

MOST_COLUMNS = 4096
_MOST_NAMES = 20
_MOST_SERIES = 200
_FURTHEST = 2**62
_METRICS = {metric.name: metric for metric in catalog.METRICS}


def names(run: WholeRun, kind: str) -> list[str]:
    """Of all nodes, each once."""
    return list(dict.fromkeys(name for each in run.histories for name in each.names(kind)))


def described(name: str) -> dict[str, str]:
    """The unit and the sentence of a metric of the catalogue."""
    metric = _METRICS.get(name)
    return {"unit": metric.unit if metric else "", "text": metric.description if metric else ""}


def columns_of(run: WholeRun, question: Question, *kinds: str) -> dict[str, Any]:
    """The series of the names that were asked for, and how many were left out."""
    first = question.whole("first", -_FURTHEST, -_FURTHEST, _FURTHEST)
    until = question.whole("until", _FURTHEST, -_FURTHEST, _FURTHEST)
    wanted = question.whole("columns", 400, 2, MOST_COLUMNS)
    rank, left_out = question.text("rank"), 0
    found: list[dict[str, Any]] = []
    for name in question.texts("name")[:_MOST_NAMES]:
        for history, series in _named(run, name, kinds):
            if rank and series.key.rank not in ("", rank):
                continue
            if len(found) >= _MOST_SERIES:
                left_out += 1
                continue
            labels = dict(series.key.labels)
            buckets = history.sums(series, first, until)
            if series.key.kind == "counter":
                columns = rates(thinned(buckets, wanted))
            else:
                columns = as_columns(thinned(buckets, wanted))
            found.append(
                {
                    "name": name,
                    "rank": series.key.rank,
                    "node": str(history.about.get("node") or ""),
                    **{key: value for key, value in labels.items() if key not in _TAKEN},
                    "kept_width": series.width,
                    "columns": columns,
                }
            )
    return {"series": found, "left_out": left_out}


_TAKEN = ("name", "rank", "node", "kept_width", "columns")


def _named(run: WholeRun, name: str, kinds: tuple[str, ...]) -> Iterator[tuple[History, Series]]:
    for kind in kinds:
        for history in run.histories:
            yield from ((history, series) for series in history.series(kind, name))


def thinned(buckets: list[Bucket], most: int) -> list[Bucket]:
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


def as_columns(buckets: list[Bucket]) -> dict[str, list[Any]]:
    """`ms` are milliseconds since 1970, as browsers count."""
    return {
        "first": [each.first for each in buckets],
        "x": [each.until for each in buckets],
        "ms": [each.last_ns // 1_000_000 for each in buckets],
        "epoch": [each.epoch for each in buckets],
        "last": [finite(each.last) for each in buckets],
        "low": [each.low for each in buckets],
        "high": [each.high for each in buckets],
        "mean": [finite(each.total / each.finite) if each.finite else None for each in buckets],
        "values": [each.finite + each.nonfinite for each in buckets],
        "not_finite": [each.nonfinite for each in buckets],
    }


def rates(buckets: list[Bucket]) -> dict[str, list[Any]]:
    """What a counter grew by, each second. A counter that began anew has no rate there."""
    pairs = [
        (one, other, (other.last_ns - one.last_ns) / 1e9)
        for one, other in pairwise(buckets)
        if one.last is not None and other.last is not None and other.last_ns > one.last_ns
    ]
    grown = [
        finite((other.last - one.last) / span_s)
        if one.last is not None and other.last is not None and other.last >= one.last
        else None
        for one, other, span_s in pairs
    ]
    return {
        "first": [one.until for one, _, _ in pairs],
        "x": [other.until for _, other, _ in pairs],
        "ms": [other.last_ns // 1_000_000 for _, other, _ in pairs],
        "per_second": grown,
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
