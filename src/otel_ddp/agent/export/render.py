"""Renders the ledger, spans and events as OTLP requests of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from otel_ddp import __version__
from otel_ddp.agent.export.deltas import Deltas
from otel_ddp.agent.export.otlp import encode, resource
from otel_ddp.agent.export.otlp.outcome import Request, Signal
from otel_ddp.agent.export.request_builder import MOST_BYTES, SCOPE, RequestBuilder
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series, is_logged
from otel_ddp.catalog import Kind
from otel_ddp.errors import containment
from otel_ddp.journal import trace_ids
from otel_ddp.journal.layout import SPAN
from otel_ddp.journal.reader import Document

T = TypeVar("T")

_MOST_SPANS = 500
_MOST_STEP_TRACES = 4096
_S = 10**9
_HOUR_NS = 3600 * _S


class Renderer:
    """Renders for one resource; each project gets a resource of its own."""

    def __init__(self, attributes: dict[str, str], deltas: Deltas | None = None) -> None:
        self._attributes = attributes
        self._deltas = deltas or Deltas("cumulative", 0)
        self._resources: dict[str, bytes] = {}
        # By run and name: the traces of steps whose first span was made, the latest ones.
        self._step_traces: dict[tuple[str, str], None] = {}

    def _resource(self, project: str) -> bytes:
        if project not in self._resources:
            self._resources[project] = encode.resource_bytes(
                resource.with_project(self._attributes, project)
            )
        return self._resources[project]

    def metrics(self, ledger: Ledger, now_ns: int) -> list[Request]:
        """Every logged value since the last call, the current value of all other series, and ends.

        Without its end, Prometheus shows a series for five minutes more: a device without a rank
        beside the same with one.
        """
        # Logged values and current values go apart: a lost request loses logged values for good,
        # while current values are sent again.
        # Each hour goes apart: for one value that is too old, a backend refuses the whole request.
        # A journal that was read hours late holds such values.
        builders: dict[tuple[int, bool, str], RequestBuilder] = {}

        def add(series: Series, hour: int, may_be_lost: bool, points: list[bytes], ns: int) -> None:
            # Of one hour, logged values go first.
            key = (hour, may_be_lost, series.project)
            if key not in builders:
                builders[key] = RequestBuilder(self._resource(series.project), not may_be_lost)
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

    def documents(
        self, documents_of: Iterable[tuple[Labels, str, Sequence[Document]]]
    ) -> list[Request]:
        """Spans as traces, events as log records."""
        spans: dict[str, list[encode.Span]] = {}
        records: dict[str, list[encode.LogRecord]] = {}
        for labels, project, documents in documents_of:
            for document in documents:
                if document.kind == SPAN:
                    spans.setdefault(project, []).extend(self._spans(labels, document.content))
                elif (record := _event(labels, document.content)) is not None:
                    records.setdefault(project, []).append(record)
        return [
            *self._requests("traces", encode.spans_request, spans, lambda span: span.start_ns),
            *self._requests("logs", encode.logs_request, records, lambda record: record.time_ns),
        ]

    def _spans(self, labels: Labels, content: dict[str, Any]) -> Iterator[encode.Span]:
        """The span, behind the first one of its trace where no rank has been in that before."""
        if (span := _span(labels, content)) is None:
            return
        run, trace = dict(labels).get("run", ""), str(content.get("trace") or "")
        if not span.parent_span_id and trace_ids.is_of_step(trace):
            # Ranks of other nodes may be in this trace. Their agents make this very span too.
            first = trace_ids.first_span_id(run, trace)
            if (run, trace) not in self._step_traces:
                self._step_traces[run, trace] = None
                if len(self._step_traces) > _MOST_STEP_TRACES:
                    del self._step_traces[next(iter(self._step_traces))]
                attributes = _attributes(labels, {"step": content.get("step")})
                yield replace(
                    span,
                    name="global step",
                    span_id=first,
                    attributes=attributes,
                    error=None,
                    events=(),
                )
            span = replace(span, parent_span_id=first)
        yield span

    @containment.contained(default=MappingProxyType({}))
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
                if len(body) > MOST_BYTES and len(part) > 1:
                    middle = len(part) // 2
                    parts[:0] = part[:middle], part[middle:]
                    continue
                oldest_s = min(map(time_ns, part)) // _S
                yield Request(signal, body, len(part), oldest_s=oldest_s)


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


def _span(labels: Labels, content: dict[str, Any]) -> encode.Span | None:
    run = dict(labels).get("run", "")
    try:
        link = content.get("link")
        return encode.Span(
            name=str(content["name"]),
            trace_id=trace_ids.trace_id(run, str(content.get("trace") or "")),
            span_id=bytes.fromhex(content["id"]),
            parent_span_id=bytes.fromhex(content.get("parent") or ""),
            start_ns=_time_ns(content["start"]),
            end_ns=_time_ns(content["end"]),
            attributes=_attributes(labels, content),
            error=str(content["error"]) if content.get("error") else None,
            events=[
                *_exception(content),
                *(
                    encode.SpanEvent(
                        str(each["name"]), _time_ns(each["time"]), _mapping(each["attributes"])
                    )
                    for each in content.get("events") or ()
                ),
            ],
            links=[(trace_ids.trace_id(run, str(link[0])), bytes.fromhex(link[1]))] if link else (),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # a record of another version


def _exception(content: dict[str, Any]) -> Iterator[encode.SpanEvent]:
    """The exception that ended a span, as an event of it."""
    if (names := content.get("exception")) is None:
        return
    _, full_name = names
    said = str(content.get("error") or "").partition(": ")[2]
    attributes = {"exception.type": str(full_name)} | ({"exception.message": said} if said else {})
    yield encode.SpanEvent("exception", _time_ns(content["end"]), attributes)


def _event(labels: Labels, content: dict[str, Any]) -> encode.LogRecord | None:
    try:
        trace, run = str(content.get("trace") or ""), dict(labels).get("run", "")
        return encode.LogRecord(
            time_ns=_time_ns(content["time"]),
            event_name=str(content["name"]),
            body=str(content.get("body") or content["name"]),
            severity=str(content.get("severity") or "INFO"),
            severity_number=_severity_number(content.get("severity_number")),
            scope=str(content.get("scope") or ""),
            attributes=_attributes(labels, content),
            trace_id=trace_ids.trace_id(run, trace) if trace else b"",
            span_id=bytes.fromhex(content.get("span") or ""),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _severity_number(value: Any) -> int:
    return value if isinstance(value, int) and 1 <= value <= 24 else 0


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
    if content.get("exception"):
        found["error.type"] = str(content["exception"][0])
    # Last: an attribute of the user's never replaces a label.
    found.update(labels)
    return found
