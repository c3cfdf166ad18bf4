"""Renders the ledger as OTLP requests of bounded size, and totals as deltas where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Literal
from weakref import WeakKeyDictionary

from otel_ddp import __version__, errors
from otel_ddp.agent.export.otlp import Request, encode, in_parts, resource
from otel_ddp.agent.export.otlp.encode import SCOPE
from otel_ddp.agent.ledger import Buckets, Ledger, Series, is_logged
from otel_ddp.vocabulary.catalog import Kind, Metric

_MOST_POINTS = 2000
_S = 10**9
_HOUR_NS = 3600 * _S

Preference = Literal["cumulative", "delta", "lowmemory"]

# Ours all come from totals, which the specification calls asynchronous: their counters stay
# cumulative with "lowmemory". Up-down counters stay so always.
_KINDS: Mapping[Preference, frozenset[Kind]] = {
    "cumulative": frozenset(),
    "delta": frozenset({Kind.COUNTER, Kind.HISTOGRAM}),
    "lowmemory": frozenset({Kind.HISTOGRAM}),
}
# A series that began longer ago was exported by an earlier agent, for all this one knows: what was
# added before the first export is not told twice.
_NEW_NS = 60 * 10**9


# One point: its bytes, its time, its metric. No class: there are thousands a second.
_Point = tuple[bytes, int, Metric]


def _by_hour(points: Sequence[_Point]) -> Iterable[tuple[int, Iterable[_Point]]]:
    """The points of a series, whose times grow: mostly they are of one hour."""
    if not points:
        return ()
    first, last = points[0][1] // _HOUR_NS, points[-1][1] // _HOUR_NS
    if first == last:
        return ((first, points),)
    return groupby(points, lambda point: point[1] // _HOUR_NS)


class Renderer:
    """Renders for one resource; each project gets a resource of its own."""

    def __init__(self, attributes: Mapping[str, str], deltas: Deltas | None = None) -> None:
        self._attributes = attributes
        self._deltas = deltas or Deltas("cumulative", 0)

    def metrics(self, ledger: Ledger, now_ns: int) -> list[Request]:
        """Every logged value since the last call, the current value of all other series, and ends.

        Without its end, Prometheus shows a series for five minutes more: a device without a rank
        beside the same with one.
        """
        # Logged values and current values go apart: a lost request loses logged values for good,
        # while current values are sent again.
        # Each hour goes apart: for one value that is too old, a backend refuses the whole request.
        # A journal that was read hours late holds such values.
        apart: dict[tuple[int, bool, str], list[_Point]] = {}

        def add(series: Series, may_be_lost: bool, points: Sequence[_Point]) -> None:
            for hour, of_hour in _by_hour(points):
                # Of one hour, logged values go first.
                key = (hour, may_be_lost, series.project)
                apart.setdefault(key, []).extend(of_hour)

        with ledger.lock:
            for metric, rows in ledger.families():
                logged = is_logged(metric)
                points = self._logged if logged else self._points
                may_be_lost = not (logged or self._deltas.applies_to(metric.kind))
                for series in rows:
                    add(series, may_be_lost, points(series, now_ns))
            for series in ledger.take_ended():
                add(series, True, self._end(series, now_ns))
        return [request for key in sorted(apart) for request in self._requests(*key, apart[key])]

    @errors.contained(default=())
    def _points(self, series: Series, now_ns: int) -> Sequence[_Point]:
        """The point of a series, encoded, with its time."""
        metric, value, start_ns = series.metric, series.value, series.start_ns
        if self._deltas.applies_to(metric.kind):
            if (added := self._deltas.take(series, now_ns)) is None:
                return ()
            value, start_ns = added
        if isinstance(value, Buckets):
            return [(_histogram_point(series, value, now_ns, start_ns), now_ns, metric)]
        if value is None:
            return ()
        if metric.kind is Kind.GAUGE:
            start_ns = 0
        point = encode.number_point(_attributes(series), now_ns, value, start_ns)
        return [(point, now_ns, metric)]

    @errors.contained(default=())
    def _logged(self, series: Series, now_ns: int) -> Sequence[_Point]:
        """The points of a series of logged values, up to now.

        Contained for each series: one that OTLP cannot express must not lose the others, whose
        values leave the ledger here.
        """
        history, series.history = series.history or (), None
        contents = encode.number_points(_attributes(series), history)
        metric = series.metric
        return [(each, at, metric) for each, (at, _) in zip(contents, history, strict=True)]

    def _end(self, series: Series, now_ns: int) -> Sequence[_Point]:
        """The point that ends a series."""
        metric = series.metric
        # The last of logged values stays: an end behind it would hide it, where it stands between
        # two looks of a dashboard. Deltas go to receivers that add up.
        if is_logged(metric) or self._deltas.applies_to(metric.kind):
            return ()
        if metric.kind is Kind.HISTOGRAM:
            return [(encode.no_histogram(series.encoded, now_ns, metric.bounds), now_ns, metric)]
        return [(encode.no_number(series.encoded, now_ns), now_ns, metric)]

    def _requests(
        self, hour: int, may_be_lost: bool, project: str, points: Sequence[_Point]
    ) -> Iterator[Request]:
        described = encode.resource_bytes(resource.with_project(self._attributes, project))
        for part in in_parts(points, _MOST_POINTS):
            of_metrics: dict[str, tuple[Metric, list[bytes]]] = {}
            for metric, points_of in groupby(part, itemgetter(2)):
                contents = of_metrics.setdefault(metric.name, (metric, []))[1]
                contents += [content for content, _, _ in points_of]
            metrics = [
                encode.metric(
                    *(metric.name, metric.description, metric.unit, metric.kind.value, contents),
                    delta=self._deltas.applies_to(metric.kind),
                )
                for metric, contents in of_metrics.values()
            ]
            body = encode.metrics_request(described, SCOPE, __version__, metrics)
            oldest_s = min([time_ns for _, time_ns, _ in part]) // _S
            yield Request("metrics", body, len(part), not may_be_lost, oldest_s)


def _attributes(series: Series) -> bytes:
    series.encoded = series.encoded or encode.attribute_bytes(dict(series.labels))
    return series.encoded


def _histogram_point(series: Series, value: Buckets, now_ns: int, start_ns: int) -> bytes:
    attributes = series.encoded or encode.attribute_bytes(
        dict(series.labels), encode.HISTOGRAM_ATTRIBUTES
    )
    series.encoded = attributes
    # Those that were not exported before, in the order of their times.
    new = [each for each in value.exemplars.values() if each.time_ns > series.exemplars_ns]
    new.sort(key=lambda each: each.time_ns)
    if new:
        series.exemplars_ns = new[-1].time_ns
    counts = [int(count) for count in value.counts]
    return encode.histogram_point(
        *(attributes, now_ns, start_ns, sum(counts), value.total),
        *(series.metric.bounds, counts, new),
    )


class Deltas:
    """Remembers, for each series, what was exported last."""

    def __init__(self, preference: Preference, began_ns: int) -> None:
        """*began_ns*: when this agent began."""
        self._kinds = _KINDS[preference]
        self._began_ns = began_ns
        self._last: WeakKeyDictionary[Series, tuple[float | Buckets, int, int]] = (
            WeakKeyDictionary()
        )

    def applies_to(self, kind: Kind) -> bool:
        """Whether points of this kind are deltas."""
        return kind in self._kinds

    def take(self, series: Series, now_ns: int) -> tuple[float | Buckets, int] | None:
        """What was added, and since when; None where that is not known."""
        value, start_ns = series.value, series.start_ns
        if value is None:
            return None
        last = self._last.get(series)
        self._last[series] = (value, start_ns, now_ns)
        if last is None:
            return (value, start_ns) if start_ns > self._began_ns - _NEW_NS else None
        before, began_ns, exported_ns = last
        if start_ns != began_ns:
            # Another process has these labels now, and counts from its own beginning.
            return value, max(start_ns, exported_ns)
        return _added(value, before), exported_ns


def _added(value: float | Buckets, before: float | Buckets) -> float | Buckets:
    """The difference; the value itself where the total has begun anew."""
    if isinstance(value, Buckets) and isinstance(before, Buckets):
        counts = tuple(now - then for now, then in zip(value.counts, before.counts, strict=True))
        if min(counts, default=0) < 0:
            return value
        return value._replace(counts=counts, total=value.total - before.total)
    if isinstance(value, Buckets) or isinstance(before, Buckets) or value < before:
        return value
    return value - before
