"""Renders the ledger as OTLP requests of bounded size; totals are cumulative."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

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
    """Points that go into one request."""

    def __init__(self) -> None:
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

    def metrics(self, ledger: Ledger, now_ns: int) -> Iterator[Request]:
        """Every logged value since the last call, the current value of all other series, and ends.

        Without its end, Prometheus shows a series for five minutes more: a device without a rank
        beside the same with one.
        """
        with ledger.lock:
            families, ended = [*ledger.families()], ledger.take_ended()
        # Logged values and current values go apart: a lost request loses logged values for good,
        # while current values are sent again.
        logged = [each for metric, rows in families if is_logged(metric) for each in rows]
        # Each hour goes apart: for one value that is too old, a backend refuses the whole request.
        # A journal that was read hours late holds such values.
        while logged := [each for each in logged if each.history is not None]:
            first_ns = min([each.history[0][0] for each in logged if each.history])
            until_ns = (first_ns // _HOUR_NS + 1) * _HOUR_NS
            of_hour = ((each, self._logged(each, until_ns)) for each in logged)
            yield from self._requests(of_hour, irreplaceable=True)
        others = [each for metric, rows in families if not is_logged(metric) for each in rows]
        standing = ((each, self._points(each, now_ns)) for each in others)
        ends = ((each, self._end(each, now_ns)) for each in ended)
        yield from self._requests(chain(standing, ends), irreplaceable=False)

    def _requests(
        self, found: Iterable[tuple[Series, Sequence[_Points]]], *, irreplaceable: bool
    ) -> Iterator[Request]:
        """These points of each series, in requests of bounded size."""
        of_projects: dict[str, _Waiting] = {}
        for series, of_series in found:
            for points in of_series:
                waiting = of_projects.setdefault(series.project, _Waiting())
                if not waiting.has_room(points):
                    yield self._request(series.project, waiting, irreplaceable)
                    waiting = of_projects[series.project] = _Waiting()
                waiting.add(points)
        for project, waiting in of_projects.items():
            yield self._request(project, waiting, irreplaceable)

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
    def _logged(self, series: Series, until_ns: int) -> Sequence[_Points]:
        """Take the points of a series of logged values before this time.

        Contained for each series: one that OTLP cannot express must not lose the others, whose
        values leave the ledger here.
        """
        assert series.history is not None
        times, values = series.history
        end = bisect_left(times, until_ns)
        series.history = (times[end:], values[end:]) if end < len(times) else None
        attributes, found = _attributes(series), list[_Points]()
        most = encode.most_points(attributes, _MOST_POINTS // 4)
        for begin in range(0, end, most):
            part = times[begin : min(begin + most, end)]
            content = encode.number_points(attributes, part, values[begin : begin + len(part)])
            found.append((content, part[0], series.metric, len(part)))
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

    def _request(self, project: str, waiting: _Waiting, irreplaceable: bool) -> Request:
        described = encode.resource_bytes(resource.with_project(self._attributes, project))
        of_metrics: dict[str, tuple[Metric, list[bytes]]] = {}
        for content, _, metric, _ in waiting.points:
            of_metrics.setdefault(metric.name, (metric, []))[1].append(content)
        metrics = chain.from_iterable(encode.metric(*each) for each in of_metrics.values())
        body = encode.request(described, encode.in_scope(SCOPE, __version__, metrics))
        oldest_s = min([at_ns for _, at_ns, _, _ in waiting.points]) // _S
        return Request("metrics", body, waiting.count, irreplaceable, oldest_s)


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
