"""Renders the ledger as OTLP requests of bounded size; totals are cumulative."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

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


class _Waiting:
    """Points that go into one request, and the requests that are full."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.clear()

    def clear(self) -> None:
        self.points: list[_Points] = []
        self.count = self.size = 0

    def has_room(self, points: _Points) -> bool:
        """Whether these may be added; in an empty request they may."""
        room = self.size + len(points[0]) <= encode.MOST_BYTES
        return not self.points or (room and self.count + points[3] <= _MOST_POINTS)

    def add(self, points: _Points) -> None:
        self.points.append(points)
        self.size += len(points[0])
        self.count += points[3]


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
        apart: dict[tuple[int, bool, str], _Waiting] = {}

        def add(series: Series, may_be_lost: bool, found: Iterable[_Points]) -> None:
            for each in found:
                # Of one hour, logged values go first.
                key = (each[1] // _HOUR_NS, may_be_lost, series.project)
                waiting = apart.setdefault(key, _Waiting())
                if not waiting.has_room(each):
                    self._finish(key, waiting)
                waiting.add(each)

        with ledger.lock:
            for metric, rows in ledger.families():
                logged = is_logged(metric)
                points = self._logged if logged else self._points
                for series in rows:
                    add(series, not logged, points(series, now_ns))
            for series in ledger.take_ended():
                add(series, True, self._end(series, now_ns))
        for key, waiting in apart.items():
            self._finish(key, waiting)
        return [request for _, each in sorted(apart.items()) for request in each.requests]

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

    def _finish(self, key: tuple[int, bool, str], waiting: _Waiting) -> None:
        """Make a request of what waits."""
        _, may_be_lost, project = key
        described = encode.resource_bytes(resource.with_project(self._attributes, project))
        of_metrics: dict[str, tuple[Metric, list[bytes]]] = {}
        for content, _, metric, _ in waiting.points:
            of_metrics.setdefault(metric.name, (metric, []))[1].append(content)
        metrics = [encode.metric(metric, contents) for metric, contents in of_metrics.values()]
        body = encode.request(described, [encode.in_scope(SCOPE, __version__, metrics)])
        oldest_s = min([at_ns for _, at_ns, _, _ in waiting.points]) // _S
        request = Request("metrics", body, waiting.count, not may_be_lost, oldest_s)
        waiting.requests.append(request)
        waiting.clear()


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
