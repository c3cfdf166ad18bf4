"""Renders the ledger as OTLP requests of bounded size; totals are cumulative."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from otel_ddp import __version__, errors
from otel_ddp.agent.export.otlp import encode, resource
from otel_ddp.agent.export.otlp.encode import SCOPE
from otel_ddp.agent.ledger import Buckets, Ledger, Series, is_logged
from otel_ddp.agent.queue.folder import Request
from otel_ddp.vocabulary.catalog import Kind, Metric

_MOST_POINTS = 2000
_S = 10**9
_HOUR_NS = 3600 * _S

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

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._attributes = attributes

    def metrics(self, ledger: Ledger, now_ns: int) -> list[Request]:
        """Every logged value since the last call, the current value of all other series, and ends.

        Without its end, Prometheus shows a series for five minutes more: a device without a rank
        beside the same with one.
        """
        # Logged values and current values go apart: a lost request loses logged values for good,
        # while current values are sent again.
        # Each hour goes apart: for one value that is too old, a backend refuses the whole request.
        # A journal that was read hours late holds such values.
        apart: dict[tuple[int, bool, str], tuple[list[_Point], list[Request]]] = {}

        def add(series: Series, may_be_lost: bool, points: Sequence[_Point]) -> None:
            for hour, of_hour in _by_hour(points):
                # Of one hour, logged values go first.
                key = (hour, may_be_lost, series.project)
                waiting, requests = apart.setdefault(key, ([], []))
                waiting.extend(of_hour)
                # Soon: a point takes much more memory than its part of a request.
                whole = len(waiting) // _MOST_POINTS * _MOST_POINTS
                requests += self._requests(*key, waiting[:whole])
                del waiting[:whole]

        with ledger.lock:
            for metric, rows in ledger.families():
                logged = is_logged(metric)
                points = self._logged if logged else self._points
                for series in rows:
                    add(series, not logged, points(series, now_ns))
            for series in ledger.take_ended():
                add(series, True, self._end(series, now_ns))
        found: list[Request] = []
        for key, (waiting, requests) in sorted(apart.items()):
            found += [*requests, *self._requests(*key, waiting)]
        return found

    @errors.contained(default=())
    def _points(self, series: Series, now_ns: int) -> Sequence[_Point]:
        """The point of a series, encoded, with its time."""
        metric, value, start_ns = series.metric, series.value, series.start_ns
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
        (times, values), series.history = series.history or ((), ()), None
        contents = encode.number_points(_attributes(series), times, values)
        return [(each, at, series.metric) for each, at in zip(contents, times, strict=True)]

    def _end(self, series: Series, now_ns: int) -> Sequence[_Point]:
        """The point that ends a series."""
        metric = series.metric
        # The last of logged values stays: an end behind it would hide it, where it stands between
        # two looks of a dashboard.
        if is_logged(metric):
            return ()
        if metric.kind is Kind.HISTOGRAM:
            return [(encode.no_histogram(series.encoded, now_ns, metric.bounds), now_ns, metric)]
        return [(encode.no_number(series.encoded, now_ns), now_ns, metric)]

    def _requests(
        self, hour: int, may_be_lost: bool, project: str, points: Sequence[_Point]
    ) -> Iterator[Request]:
        described = encode.resource_bytes(resource.with_project(self._attributes, project))
        for part in encode.in_parts(points, _MOST_POINTS):
            of_metrics: dict[str, tuple[Metric, list[bytes]]] = {}
            for metric, points_of in groupby(part, itemgetter(2)):
                contents = of_metrics.setdefault(metric.name, (metric, []))[1]
                contents += [content for content, _, _ in points_of]
            metrics = [encode.metric(metric, contents) for metric, contents in of_metrics.values()]
            body = encode.request(described, [encode.in_scope(SCOPE, __version__, metrics)])
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
    counts = [int(count) for count in value.counts]
    return encode.histogram_point(
        attributes, now_ns, start_ns, value.total, series.metric.bounds, counts
    )
