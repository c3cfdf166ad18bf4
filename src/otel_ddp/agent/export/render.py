"""Renders the ledger, spans and events as OTLP requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2s
from types import MappingProxyType
from typing import Any, TypeVar

from otel_ddp import __version__, containment
from otel_ddp.agent.export.delivery import Request
from otel_ddp.agent.export.otlp import encode, resource
from otel_ddp.agent.export.otlp.outcome import Signal
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series, is_logged
from otel_ddp.catalog import Kind, Metric
from otel_ddp.journal.layout import SPAN
from otel_ddp.journal.reader import Document

T = TypeVar("T")

SCOPE = "otel_ddp"
_MOST_POINTS = 2000
_MOST_SPANS = 500
_S = 10**9
_HOUR_NS = 3600 * _S
_NEVER = 2**63


class Renderer:
    """Knows the resource; turns what there is into requests of bounded size."""

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
        """Every logged value since the last time, and how everything else stands now."""
        # Apart: what is logged is lost with its request, what stands is told again next time.
        # By the hour: for one value that is too old a backend refuses a whole request, and so are
        # those of a journal that nobody has read for hours.
        batches: dict[tuple[int, bool, str], _Batch] = {}
        with ledger.lock:
            for metric, rows in ledger.families():
                lasting = is_logged(metric)
                for series in rows:
                    for hour, (oldest_ns, points) in _points(series, now_ns).items():
                        # What is lost with its request goes first.
                        key = (hour, not lasting, series.project)
                        if key not in batches:
                            batches[key] = _Batch(self._resource(series.project), lasting)
                        batches[key].add(metric, points, oldest_ns)
        return [request for key in sorted(batches) for request in batches[key].close()]

    def documents(self, taken: Iterable[tuple[Labels, str, Sequence[Document]]]) -> list[Request]:
        """Spans as traces, events as log records."""
        spans: dict[str, list[encode.Span]] = {}
        records: dict[str, list[encode.LogRecord]] = {}
        for labels, project, documents in taken:
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
            for at in range(0, len(found), _MOST_SPANS):
                part = found[at : at + _MOST_SPANS]
                body = encoded(attributes, part, SCOPE, __version__)
                oldest_s = min(map(time_ns, part)) // _S
                yield Request(signal, body, len(part), oldest_s=oldest_s)


class _Batch:
    """Gathers points into requests of at most 2,000."""

    def __init__(self, of: bytes, lasting: bool) -> None:
        self._resource = of
        self._lasting = lasting
        self._metrics: dict[str, tuple[Metric, list[bytes]]] = {}
        self._count = 0
        self._oldest_ns = _NEVER
        self._requests: list[Request] = []

    def add(self, metric: Metric, points: list[bytes], oldest_ns: int) -> None:
        while points:
            self._oldest_ns = min(self._oldest_ns, oldest_ns)
            room = _MOST_POINTS - self._count
            self._metrics.setdefault(metric.name, (metric, []))[1].extend(points[:room])
            self._count += min(room, len(points))
            points = points[room:]
            if self._count >= _MOST_POINTS:
                self._flush()

    def _flush(self) -> None:
        if not self._count:
            return
        metrics = [
            encode.metric(metric.name, metric.description, metric.unit, metric.kind.value, points)
            for metric, points in self._metrics.values()
        ]
        body = encode.metrics_request(self._resource, SCOPE, __version__, metrics)
        oldest_s = self._oldest_ns // _S
        self._requests.append(Request("metrics", body, self._count, self._lasting, oldest_s))
        self._metrics, self._count, self._oldest_ns = {}, 0, _NEVER

    def close(self) -> list[Request]:
        self._flush()
        return self._requests


@containment.contained(default=MappingProxyType({}))
def _points(series: Series, now_ns: int) -> Mapping[int, tuple[int, list[bytes]]]:
    """Encoded, by the hour in which they were measured, with the time of the oldest.

    Contained one by one: what has no number in OTLP takes none of the others along, whose logged
    values are taken out of the ledger here.
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
        for at, seen in history or ():
            # Times of a series grow, so the first of an hour is its oldest.
            _, points = found.setdefault(at // _HOUR_NS, (at, []))
            points.append(encode.number_point(attributes, at, seen))
        return found
    start_ns = series.start_ns if series.metric.kind is not Kind.GAUGE else 0
    return {hour: (now_ns, [encode.number_point(attributes, now_ns, value, start_ns)])}


def trace_id(labels: Labels, trace: str) -> bytes:
    """The same on every rank that names its trace alike: ranks never have to agree on one."""
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
        return None  # another version's record


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


def _time_ns(said: Any) -> int:
    # OTLP refuses any other with an exception, and with it what all the others have to say.
    time_ns = int(said)
    if not 0 <= time_ns < 2**63:
        raise ValueError(f"{time_ns} is no time")
    return time_ns


def _mapping(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise TypeError(f"{said!r} are no attributes")
    return said


def _attributes(labels: Labels, content: dict[str, Any]) -> dict[str, Any]:
    said = content.get("attributes")
    found: dict[str, Any] = {}
    if isinstance(said, dict):
        found.update((key, value) for key, value in said.items() if value is not None)
    if content.get("step") is not None:
        found["step"] = int(content["step"])
    # Last: no attribute of the user's takes the place of a label.
    found.update(labels)
    return found
