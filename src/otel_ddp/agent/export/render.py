"""Renders the ledger as OTLP requests of bounded size, and totals as deltas where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

from otel_ddp import __version__, errors
from otel_ddp.agent.export.otlp import MOST_BYTES, Request, encode, resource
from otel_ddp.agent.export.otlp.encode import SCOPE
from otel_ddp.agent.ledger import Buckets, Ledger, Series, is_logged
from otel_ddp.vocabulary.catalog import Kind, Metric

_MOST_POINTS = 2000
_S = 10**9
_HOUR_NS = 3600 * _S
_LATEST = 2**63

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
        builders: dict[tuple[int, bool, str], _RequestBuilder] = {}

        def add(series: Series, hour: int, may_be_lost: bool, points: list[bytes], ns: int) -> None:
            # Of one hour, logged values go first.
            key = (hour, may_be_lost, series.project)
            if key not in builders:
                described = resource.with_project(self._attributes, series.project)
                builders[key] = _RequestBuilder(encode.resource_bytes(described), not may_be_lost)
            delta = self._deltas.applies_to(series.metric.kind)
            builders[key].add(series.metric, points, ns, delta)

        with ledger.lock:
            for metric, rows in ledger.families():
                delta = self._deltas.applies_to(metric.kind)
                irreplaceable = is_logged(metric) or delta
                for series in rows:
                    points_of = self._points(series, now_ns, delta)
                    for hour, (oldest_ns, points) in points_of.items():
                        add(series, hour, not irreplaceable, points, oldest_ns)
            for series in ledger.take_ended():
                if points := self._end(series, now_ns):
                    add(series, now_ns // _HOUR_NS, True, points, now_ns)
        return [request for key in sorted(builders) for request in builders[key].build()]

    @errors.contained(default=MappingProxyType({}))
    def _points(
        self, series: Series, now_ns: int, delta: bool
    ) -> Mapping[int, tuple[int, list[bytes]]]:
        """A series' points, encoded, by the hour of their measurement, with the oldest one's time.

        Contained for each series: one that OTLP cannot express must not lose the others, whose
        logged values leave the ledger here.
        """
        hour = now_ns // _HOUR_NS
        value, start_ns = series.value, series.start_ns
        if delta:
            if (added := self._deltas.take(series, now_ns)) is None:
                return {}
            value, start_ns = added
        if isinstance(value, Buckets):
            return {hour: (now_ns, [_histogram_point(series, value, now_ns, start_ns)])}
        if value is None:
            return {}
        attributes = series.encoded or encode.attribute_bytes(dict(series.labels))
        series.encoded = attributes
        if is_logged(series.metric):
            history, series.history = series.history, None
            found: dict[int, tuple[int, list[bytes]]] = {}
            for at, logged in history or ():
                # The times of a series grow, so the first one of an hour is its oldest.
                _, points = found.setdefault(at // _HOUR_NS, (at, []))
                points.append(encode.number_point(attributes, at, logged))
            return found
        if series.metric.kind is Kind.GAUGE:
            start_ns = 0
        return {hour: (now_ns, [encode.number_point(attributes, now_ns, value, start_ns)])}

    def _end(self, series: Series, now_ns: int) -> list[bytes]:
        """The point that ends a series."""
        metric = series.metric
        # The last of logged values stays: an end behind it would hide it, where it stands between
        # two looks of a dashboard. Deltas go to receivers that add up.
        if is_logged(metric) or self._deltas.applies_to(metric.kind):
            return []
        if metric.kind is Kind.HISTOGRAM:
            return [encode.no_histogram(series.encoded, now_ns, metric.bounds)]
        return [encode.no_number(series.encoded, now_ns)]


def _histogram_point(series: Series, value: Buckets, now_ns: int, start_ns: int) -> bytes:
    attributes = series.encoded or encode.attribute_bytes(
        dict(series.labels), encode.HISTOGRAM_ATTRIBUTES
    )
    series.encoded = attributes
    counts = [int(count) for count in value.counts]
    # Those that were not exported before, in the order of their times.
    new = [each for each in value.exemplars.values() if each.time_ns > series.exemplars_ns]
    new.sort(key=lambda each: each.time_ns)
    if new:
        series.exemplars_ns = new[-1].time_ns
    # fmt: off
    return encode.histogram_point(attributes, now_ns, start_ns, sum(counts),
                                  value.total, series.metric.bounds, counts, new)
    # fmt: on


class _RequestBuilder:
    """One for each resource and hour, and for what may be lost or not."""

    def __init__(self, resource_of: bytes, irreplaceable: bool) -> None:
        self._resource = resource_of
        self._irreplaceable = irreplaceable
        self._metrics: dict[str, tuple[Metric, bool, list[bytes]]] = {}
        self._count = 0
        self._size_bytes = 0
        self._oldest_ns = _LATEST
        self._requests: list[Request] = []

    def add(self, metric: Metric, points: list[bytes], oldest_ns: int, delta: bool) -> None:
        while points:
            fitting = self._fitting(points)
            if not fitting:
                self._end_request()
                continue
            self._oldest_ns = min(self._oldest_ns, oldest_ns)
            self._metrics.setdefault(metric.name, (metric, delta, []))[2].extend(fitting)
            self._count += len(fitting)
            self._size_bytes += sum(map(len, fitting))
            points = points[len(fitting) :]

    def _fitting(self, points: list[bytes]) -> list[bytes]:
        """The first of these points for which there is room; one at least in an empty request."""
        some = points[: _MOST_POINTS - self._count]
        room_bytes = MOST_BYTES - self._size_bytes
        if sum(map(len, some)) <= room_bytes:
            return some
        sizes = accumulate(map(len, some))
        fitting = [point for point, size in zip(some, sizes, strict=True) if size <= room_bytes]
        return fitting or (some[:1] if not self._count else [])

    def _end_request(self) -> None:
        if not self._count:
            return
        metrics = [
            encode.metric(
                *(metric.name, metric.description, metric.unit, metric.kind.value, points),
                delta=delta,
            )
            for metric, delta, points in self._metrics.values()
        ]
        body = encode.metrics_request(self._resource, SCOPE, __version__, metrics)
        oldest_s = self._oldest_ns // _S
        self._requests.append(Request("metrics", body, self._count, self._irreplaceable, oldest_s))
        self._metrics, self._oldest_ns = {}, _LATEST
        self._count = self._size_bytes = 0

    def build(self) -> list[Request]:
        """All requests, the last one ended."""
        self._end_request()
        return self._requests


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
