"""Renders the ledger as OTLP requests of bounded size; totals are cumulative."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

# Points of one series and hour: their bytes, the first one's time, the metric, and how many. No
# class: there are thousands a second.
_Points = tuple[bytes, int, Metric, int]
_Key = tuple[int, bool, str]
"""What goes apart: by hour, whether it may be lost, by project."""


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
        apart: defaultdict[_Key, list[_Points]] = defaultdict(list)

        def add(series: Series, may_be_lost: bool, found: Iterable[_Points]) -> None:
            for each in found:
                # Of one hour, logged values go first.
                apart[each[1] // _HOUR_NS, may_be_lost, series.project].append(each)

        with ledger.lock:
            for metric, rows in ledger.families():
                logged = is_logged(metric)
                points = self._logged if logged else self._points
                for series in rows:
                    add(series, not logged, points(series, now_ns))
            for series in ledger.take_ended():
                add(series, True, self._end(series, now_ns))
        return [
            self._request(key, part)
            for key, points in sorted(apart.items())
            for part in encode.in_parts(points, _MOST_POINTS, itemgetter(3))
        ]

    @errors.contained(default=())
    def _points(self, series: Series, now_ns: int) -> Sequence[_Points]:
        """The point of a series, encoded, with its time."""
        metric, value, start_ns = series.metric, series.value, series.start_ns
        if isinstance(value, Buckets):
            return [(_histogram_point(series, value, now_ns, start_ns), now_ns, metric, 1)]
        if value is None:
            return ()
        if metric.kind is Kind.GAUGE:
            start_ns = 0
        point = encode.number_point(_attributes(series), now_ns, value, start_ns)
        return [(point, now_ns, metric, 1)]

    @errors.contained(default=())
    def _logged(self, series: Series, now_ns: int) -> Sequence[_Points]:
        """The points of a series of logged values, up to now.

        Contained for each series: one that OTLP cannot express must not lose the others, whose
        values leave the ledger here.
        """
        (times, values), series.history = series.history or ((), ()), None
        attributes, found, begin = _attributes(series), list[_Points](), 0
        most = encode.most_points(attributes, _MOST_POINTS // 4)
        while begin < len(times):
            next_hour_ns = (times[begin] // _HOUR_NS + 1) * _HOUR_NS
            end = bisect_left(times, next_hour_ns, begin, min(begin + most, len(times)))
            content = encode.number_points(attributes, times[begin:end], values[begin:end])
            found.append((content, times[begin], series.metric, end - begin))
            begin = end
        return found

    def _end(self, series: Series, now_ns: int) -> Sequence[_Points]:
        """The point that ends a series."""
        metric = series.metric
        # The last of logged values stays: an end behind it would hide it, where it stands between
        # two looks of a dashboard.
        if is_logged(metric):
            return ()
        if metric.kind is Kind.HISTOGRAM:
            return [(encode.no_histogram(series.encoded, now_ns, metric.bounds), now_ns, metric, 1)]
        return [(encode.no_number(series.encoded, now_ns), now_ns, metric, 1)]

    def _request(self, key: _Key, points: Sequence[_Points]) -> Request:
        _, may_be_lost, project = key
        described = encode.resource_bytes(resource.with_project(self._attributes, project))
        of_metrics: dict[str, tuple[Metric, list[bytes]]] = {}
        for content, _, metric, _ in points:
            of_metrics.setdefault(metric.name, (metric, []))[1].append(content)
        metrics = [encode.metric(metric, contents) for metric, contents in of_metrics.values()]
        body = encode.request(described, [encode.in_scope(SCOPE, __version__, metrics)])
        oldest_s = min([at_ns for _, at_ns, _, _ in points]) // _S
        count = sum([many for _, _, _, many in points])
        return Request("metrics", body, count, not may_be_lost, oldest_s)


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
