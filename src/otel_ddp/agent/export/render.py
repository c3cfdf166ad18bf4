"""Renders the ledger, spans and events as OTLP requests of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2s
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar

from otel_ddp import __version__, containment
from otel_ddp.agent.export.otlp import encode, resource
from otel_ddp.agent.export.otlp.outcome import Signal
from otel_ddp.agent.export.queues import Request
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series, is_logged
from otel_ddp.catalog import Kind, Metric
from otel_ddp.journal.layout import SPAN
from otel_ddp.journal.reader import Document

T = TypeVar("T")

SCOPE = "otel_ddp"
_MOST_POINTS = 2000
_MOST_SPANS = 500
# Gateways mostly refuse more than 1 MiB (nginx) or 4 MiB (gRPC) at once.
_MOST_BYTES = 900 * 1024
_S = 10**9
_HOUR_NS = 3600 * _S
_LATEST = 2**63


class Renderer:
    """Renders for one resource; each project gets a resource of its own."""

    def __init__(self, attributes: dict[str, str]) -> None:
        self._attributes = attributes
        self._resources: dict[str, bytes] = {}

    def _resource(self, project: str) -> bytes:
        if project not in self._resources:
            self._resources[project] = encode.resource_bytes(
                resource.with_project(self._attributes, project)
            )
        return self._resources[project]

    def metrics(self, ledger: Ledger, now_ns: int) -> list[Request]:
        """Every logged value since the last call, and the current value of all other series."""
        # Logged values and current values go apart: a lost request loses logged values for good,
        # while current values are sent again.
        # Each hour goes apart: for one value that is too old, a backend refuses the whole request.
        # A journal that was read hours late holds such values.
        builders: dict[tuple[int, bool, str], _RequestBuilder] = {}
        with ledger.lock:
            for metric, rows in ledger.families():
                irreplaceable = is_logged(metric)
                for series in rows:
                    for hour, (oldest_ns, points) in _points(series, now_ns).items():
                        # Of one hour, logged values go first.
                        key = (hour, not irreplaceable, series.project)
                        if key not in builders:
                            resource_of = self._resource(series.project)
                            builders[key] = _RequestBuilder(resource_of, irreplaceable)
                        builders[key].add(metric, points, oldest_ns)
        return [request for key in sorted(builders) for request in builders[key].build()]

    def documents(
        self, documents_of: Iterable[tuple[Labels, str, Sequence[Document]]]
    ) -> list[Request]:
        """Spans as traces, events as log records."""
        spans: dict[str, list[encode.Span]] = {}
        records: dict[str, list[encode.LogRecord]] = {}
        for labels, project, documents in documents_of:
            for document in documents:
                if document.kind == SPAN:
                    if (span := _span(labels, document.content)) is not None:
                        spans.setdefault(project, []).append(span)
                elif (record := _event(labels, document.content)) is not None:
                    records.setdefault(project, []).append(record)
        return [
            *self._requests("traces", encode.spans_request, spans, lambda span: span.start_ns),
            *self._requests("logs", encode.logs_request, records, lambda record: record.time_ns),
        ]

    def _requests(
        self,
        signal: Signal,
        encoded: Callable[[dict[str, str], Sequence[T], str, str], bytes],
        by_project: Mapping[str, Sequence[T]],
        time_ns: Callable[[T], int],
    ) -> Iterator[Request]:
        for project, found in by_project.items():
            attributes = resource.with_project(self._attributes, project)
            parts = [found[at : at + _MOST_SPANS] for at in range(0, len(found), _MOST_SPANS)]
            while parts:
                part = parts.pop(0)
                body = encoded(attributes, part, SCOPE, __version__)
                if len(body) > _MOST_BYTES and len(part) > 1:
                    middle = len(part) // 2
                    parts[:0] = part[:middle], part[middle:]
                    continue
                oldest_s = min(map(time_ns, part)) // _S
                yield Request(signal, body, len(part), oldest_s=oldest_s)


class _RequestBuilder:
    """Gathers points into requests of bounded count and size."""

    def __init__(self, resource_of: bytes, irreplaceable: bool) -> None:
        self._resource = resource_of
        self._irreplaceable = irreplaceable
        self._metrics: dict[str, tuple[Metric, list[bytes]]] = {}
        self._count = 0
        self._size_bytes = 0
        self._oldest_ns = _LATEST
        self._requests: list[Request] = []

    def add(self, metric: Metric, points: list[bytes], oldest_ns: int) -> None:
        while points:
            fitting = self._fitting(points)
            if not fitting:
                self._end_request()
                continue
            self._oldest_ns = min(self._oldest_ns, oldest_ns)
            self._metrics.setdefault(metric.name, (metric, []))[1].extend(fitting)
            self._count += len(fitting)
            self._size_bytes += sum(map(len, fitting))
            points = points[len(fitting) :]

    def _fitting(self, points: list[bytes]) -> list[bytes]:
        """The first of these points for which there is room; one at least in an empty request."""
        some = points[: _MOST_POINTS - self._count]
        room_bytes = _MOST_BYTES - self._size_bytes
        if sum(map(len, some)) <= room_bytes:
            return some
        sizes = accumulate(map(len, some))
        fitting = [point for point, size in zip(some, sizes, strict=True) if size <= room_bytes]
        return fitting or (some[:1] if not self._count else [])

    def _end_request(self) -> None:
        if not self._count:
            return
        metrics = [
            encode.metric(metric.name, metric.description, metric.unit, metric.kind.value, points)
            for metric, points in self._metrics.values()
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


@containment.contained(default=MappingProxyType({}))
def _points(series: Series, now_ns: int) -> Mapping[int, tuple[int, list[bytes]]]:
    """A series' points, encoded, by the hour of their measurement, with the oldest one's time.

    Contained for each series: one that OTLP cannot express must not lose the others, whose logged
    values leave the ledger here.
    """
    hour = now_ns // _HOUR_NS
    value = series.value
    if isinstance(value, Buckets):
        attributes = series.encoded or encode.attribute_bytes(
            dict(series.labels), encode.HISTOGRAM_ATTRIBUTES
        )
        series.encoded = attributes
        counts = [int(count) for count in value.counts]
        # fmt: off
        point = encode.histogram_point(attributes, now_ns, series.start_ns, sum(counts),
                                       value.total, series.metric.bounds, counts)
        # fmt: on
        return {hour: (now_ns, [point])}
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
    start_ns = series.start_ns if series.metric.kind is not Kind.GAUGE else 0
    return {hour: (now_ns, [encode.number_point(attributes, now_ns, value, start_ns)])}


def trace_id(labels: Labels, trace: str) -> bytes:
    """Equal on all ranks that name their trace alike, so that ranks need not agree on one."""
    run = dict(labels).get("run", "")
    return blake2s(f"{run}/{trace}".encode("utf-8", "replace"), digest_size=16).digest()


def _span(labels: Labels, content: dict[str, Any]) -> encode.Span | None:
    try:
        return encode.Span(
            name=str(content["name"]),
            trace_id=trace_id(labels, str(content.get("trace") or "")),
            span_id=bytes.fromhex(content["id"]),
            parent_span_id=bytes.fromhex(content.get("parent") or ""),
            start_ns=_time_ns(content["start"]),
            end_ns=_time_ns(content["end"]),
            attributes=_attributes(labels, content),
            error=str(content["error"]) if content.get("error") else None,
            events=[
                encode.SpanEvent(
                    str(each["name"]), _time_ns(each["time"]), _mapping(each["attributes"])
                )
                for each in content.get("events") or ()
            ],
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # a record of another version


def _event(labels: Labels, content: dict[str, Any]) -> encode.LogRecord | None:
    try:
        trace = str(content.get("trace") or "")
        return encode.LogRecord(
            time_ns=_time_ns(content["time"]),
            event_name=str(content["name"]),
            body=str(content.get("body") or content["name"]),
            severity="WARN" if content.get("severity") == "WARN" else "INFO",
            attributes=_attributes(labels, content),
            trace_id=trace_id(labels, trace) if trace else b"",
            span_id=bytes.fromhex(content.get("span") or ""),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _time_ns(value: Any) -> int:
    # The OTLP classes raise for any other number, and the whole request would be lost.
    time_ns = int(value)
    if not 0 <= time_ns < 2**63:
        raise ValueError(f"{time_ns} is no time")
    return time_ns


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} are no attributes")
    return value


def _attributes(labels: Labels, content: dict[str, Any]) -> dict[str, Any]:
    attributes = content.get("attributes")
    found: dict[str, Any] = {}
    if isinstance(attributes, dict):
        found.update((key, value) for key, value in attributes.items() if value is not None)
    if content.get("step") is not None:
        found["step"] = int(content["step"])
    # Last: an attribute of the user's never replaces a label.
    found.update(labels)
    return found
