"""Renders the ledger, spans and events as OTLP requests of bounded size; totals are cumulative."""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from otel_ddp import __version__, errors
from otel_ddp.agent.export.folder import Request
from otel_ddp.agent.export.otlp import encode
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series, is_logged
from otel_ddp.journal import layout
from otel_ddp.journal.layout import SPAN
from otel_ddp.journal.parser import Document
from otel_ddp.vocabulary.catalog import Kind, Metric

# The service name of data without a project, unless the user sets one.
_SERVICE = "otel-ddp"
# Size limits of one request: points in a request for metrics; spans, or log records, in others.
_MOST_POINTS, _MOST_MESSAGES = 2000, 500
_MOST_STEP_TRACES = 4096
_S = 10**9
_HOUR_NS = 3600 * _S
# Severity numbers of OpenTelemetry's log data model.
_SEVERITIES = {"INFO": 9, "WARN": 13, "ERROR": 17, "FATAL": 21}

# What a request consists of: encoded points of one series within one hour, or one span or log
# record. The fields are: bytes, time of the first point, number of points, metric. It is a tuple,
# not a class, since thousands are made per second.
_Part = tuple[bytes, int, int, Metric | None]


class _Batch:
    """Collects the parts of one request."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.count = self.size = 0

    def has_room(self, part: _Part, most: int) -> bool:
        """Whether a part fits into this request. An empty request takes any part."""
        room = self.size + len(part[0]) <= encode.MOST_BYTES
        return not self.parts or (room and self.count + part[2] <= most)

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.size += len(part[0])
        self.count += part[2]


def _batches(parts: Iterable[tuple[str, _Part]], most: int) -> Iterator[tuple[str, _Batch]]:
    """Divide the parts into batches of one request each. A batch has parts of one project only."""
    batches: dict[str, _Batch] = {}
    for project, part in parts:
        batch = batches.setdefault(project, _Batch())
        if not batch.has_room(part, most):
            yield project, batch
            batch = batches[project] = _Batch()
        batch.add(part)
    yield from batches.items()


# -- the OpenTelemetry resource


def resource_of(node: str, host: str) -> dict[str, str]:
    """The attributes of the OTLP resource. OTEL_RESOURCE_ATTRIBUTES overrides ours."""
    ours = {
        "service.name": _SERVICE,
        # Not a random id: with a new id, each restart of the agent would begin new series.
        "service.instance.id": node,
        "host.name": host,
        "host.arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
            platform.machine(), platform.machine()
        ),
        "os.type": "linux",
        # By the specification, only official SDKs may have the name "opentelemetry".
        "telemetry.sdk.name": "otel_ddp",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
    }
    users = OTELResourceDetector().detect()
    merged = Resource(dict(ours)).merge(Resource(dict(users.attributes)))
    return {key: str(value) for key, value in merged.attributes.items()}


def with_project(resource: Mapping[str, str], project: str) -> dict[str, str]:
    """The resource of a project. The project is the service name unless the user has set one."""
    if not project or resource.get("service.name") != _SERVICE:
        return dict(resource)
    return {**resource, "service.name": project}


class Renderer:
    """Renders the data of one node. Each project of it has its own OTLP resource."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._attributes = attributes
        # The latest traces of steps, by run and name, for which this agent has already made the
        # root span.
        self._step_traces: dict[tuple[str, str], None] = {}

    def metrics(self, ledger: Ledger, now_ns: int) -> Iterator[Request]:
        """New logged values, the current values of all other series, and ends of series.

        A series that ends gets a last point without a value, its end marker. Otherwise, Prometheus
        would show its last value for another five minutes.
        """
        with ledger.lock:
            families, ended = [*ledger.families()], ledger.take_ended()
        # Logged values have their own requests, which a full queue drops last: other metrics are
        # sent again with current values, but a logged value is sent only once.
        logged = [each for metric, rows in families if is_logged(metric) for each in rows]
        # Values of different hours go into different requests. A journal that is read late contains
        # old values, and a backend refuses a whole request for one value that is too old.
        while logged := [each for each in logged if each.history is not None]:
            first_ns = min([each.history[0][0] for each in logged if each.history])
            until_ns = (first_ns // _HOUR_NS + 1) * _HOUR_NS
            of_hour = ((each, self._logged(each, until_ns)) for each in logged)
            yield from self._of_series(of_hour, irreplaceable=True)
        others = [each for metric, rows in families if not is_logged(metric) for each in rows]
        standing = ((each, self._points(each, now_ns)) for each in others)
        ends = ((each, self._end(each, now_ns)) for each in ended)
        yield from self._of_series(chain(standing, ends), irreplaceable=False)

    def _of_series(
        self, found: Iterable[tuple[Series, Sequence[_Part]]], *, irreplaceable: bool
    ) -> Iterator[Request]:
        parts = ((series.project, part) for series, of_series in found for part in of_series)
        for project, batch in _batches(parts, _MOST_POINTS):
            of_metrics: dict[str, tuple[Metric, list[bytes]]] = {}
            for content, _, _, metric in batch.parts:
                assert metric is not None
                of_metrics.setdefault(metric.name, (metric, []))[1].append(content)
            metrics = chain.from_iterable(encode.metric(*each) for each in of_metrics.values())
            yield self._request("metrics", project, batch, metrics, irreplaceable)

    def _request(
        self,
        signal: str,
        project: str,
        batch: _Batch,
        contents: Iterable[bytes],
        irreplaceable: bool = True,
    ) -> Request:
        described = encode.resource_bytes(with_project(self._attributes, project))
        body = encode.request(described, encode.in_scope(encode.SCOPE, __version__, contents))
        oldest_s = min([at_ns for _, at_ns, _, _ in batch.parts]) // _S
        return Request(signal, body, batch.count, irreplaceable, oldest_s)

    @errors.contained(default=())
    def _points(self, series: Series, now_ns: int) -> Sequence[_Part]:
        """The current point of a series."""
        metric, value, start_ns = series.metric, series.value, series.start_ns
        if isinstance(value, Buckets):
            counts, bounds = [int(count) for count in value.counts], metric.bounds
            point = encode.histogram_point(
                _encoded(series), now_ns, start_ns, value.total, bounds, counts
            )
            return [(point, now_ns, 1, metric)]
        if value is None:
            return ()
        if metric.kind is Kind.GAUGE:
            start_ns = 0
        point = encode.number_point(_encoded(series), now_ns, value, start_ns)
        return [(point, now_ns, 1, metric)]

    @errors.contained(default=())
    def _logged(self, series: Series, until_ns: int) -> Sequence[_Part]:
        """Take the logged values of a series before this time.

        Errors are caught here, so that a series that cannot be encoded does not affect the others.
        """
        assert series.history is not None
        times, values = series.history
        end = bisect_left(times, until_ns)
        series.history = (times[end:], values[end:]) if end < len(times) else None
        attributes, found = _encoded(series), list[_Part]()
        most = encode.most_points(attributes, _MOST_POINTS // 4)
        for begin in range(0, end, most):
            part = range(begin, min(begin + most, end))
            points = [encode.number_point(attributes, times[at], values[at]) for at in part]
            found.append((b"".join(points), times[begin], len(part), series.metric))
        return found

    def _end(self, series: Series, now_ns: int) -> Sequence[_Part]:
        """The end marker of a series, a last point without a value."""
        metric = series.metric
        # A logged value gets no end marker: some dashboards would then no longer show the last
        # value.
        if is_logged(metric):
            return ()
        if metric.kind is Kind.HISTOGRAM:
            return [(encode.no_histogram(series.encoded, now_ns, metric.bounds), now_ns, 1, metric)]
        return [(encode.no_number(series.encoded, now_ns), now_ns, 1, metric)]

    # -- spans and log records

    def documents(
        self, documents_of: Iterable[tuple[Labels, str, Sequence[Document]]]
    ) -> Iterator[Request]:
        """Make requests with spans and log records. Invalid documents are skipped."""
        found: dict[str, list[tuple[str, _Part]]] = {"traces": [], "logs": []}
        for labels, project, documents in documents_of:
            for each in documents:
                signal = "traces" if each.kind == SPAN else "logs"
                make = self._spans if each.kind == SPAN else _log_records
                try:
                    parts = [(project, part) for part in make(labels, each.content)]
                except (KeyError, TypeError, ValueError, OverflowError):
                    continue  # a record of another version of otel_ddp
                found[signal] += parts
        for signal, all_parts in found.items():
            for project, batch in _batches(all_parts, _MOST_MESSAGES):
                contents = [content for content, _, _, _ in batch.parts]
                yield self._request(signal, project, batch, contents)

    def _spans(self, labels: Labels, content: dict[str, Any]) -> Iterator[_Part]:
        """Encode a span. If it begins the trace of a step, the trace's root span is added before
        it."""
        run, trace = dict(labels).get("run", ""), str(content.get("trace") or "")
        span = _span(run, trace, labels, content)
        if not span.parent_span_id and layout.is_of_step(trace):
            # The root span's id follows from run and trace. So the spans that each node's agent
            # makes have the same root span.
            span.parent_span_id = layout.first_span_id(run, trace)
            if (run, trace) not in self._step_traces:
                self._step_traces[run, trace] = None
                if len(self._step_traces) > _MOST_STEP_TRACES:
                    del self._step_traces[next(iter(self._step_traces))]
                whole: dict[str, Any] = {"name": "global step", "id": span.parent_span_id.hex()}
                whole |= {key: content.get(key) for key in ("start", "end", "step")}
                yield _message(span.start_time_unix_nano, _span(run, trace, labels, whole))
        yield _message(span.start_time_unix_nano, span)


def _encoded(series: Series) -> bytes:
    """The encoded attributes of a series. They are encoded once and stored in the series."""
    is_histogram = series.metric.kind is Kind.HISTOGRAM
    field = encode.HISTOGRAM_ATTRIBUTES if is_histogram else encode.NUMBER_ATTRIBUTES
    series.encoded = series.encoded or encode.attribute_bytes(dict(series.labels), field)
    return series.encoded


def _message(time_ns: int, content: trace_pb2.Span | logs_pb2.LogRecord) -> _Part:
    return encode.element(2, bytes(content.SerializeToString())), time_ns, 1, None


def _span(run: str, trace: str, labels: Labels, content: dict[str, Any]) -> trace_pb2.Span:
    span = trace_pb2.Span(
        name=_clean(content["name"]),
        trace_id=layout.trace_id(run, trace),
        span_id=bytes.fromhex(content["id"]),
        parent_span_id=bytes.fromhex(content.get("parent") or ""),
        start_time_unix_nano=_time_ns(content["start"]),
        end_time_unix_nano=_time_ns(content["end"]),
        kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
        # There are two flags: the parent span is known to be local or remote, and it is remote. Set
        # only the first: the parent is local, i.e. in the same process.
        flags=trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
    )
    span.MergeFromString(_attributes(labels, content, encode.SPAN_ATTRIBUTES))
    if content.get("error"):
        span.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        span.status.message = _clean(content["error"])
    if link := content.get("link"):
        span.links.add(trace_id=layout.trace_id(run, str(link[0])), span_id=bytes.fromhex(link[1]))
    return span


def _log_records(labels: Labels, content: dict[str, Any]) -> Iterator[_Part]:
    trace, time_ns = str(content.get("trace") or ""), _time_ns(content["time"])
    severity = str(content.get("severity") or "INFO")
    record = logs_pb2.LogRecord(
        time_unix_nano=time_ns,
        observed_time_unix_nano=time_ns,
        severity_number=_SEVERITIES.get(severity, 9),  # type: ignore[arg-type]
        severity_text=_clean(severity),
        event_name=_clean(content["name"]),
        trace_id=layout.trace_id(dict(labels).get("run", ""), trace) if trace else b"",
        span_id=bytes.fromhex(content.get("span") or ""),
    )
    record.body.string_value = _clean(content.get("body") or content["name"])
    record.MergeFromString(_attributes(labels, content, encode.LOG_ATTRIBUTES))
    yield _message(time_ns, record)


def _clean(text: Any) -> str:
    return encode.utf8(str(text)).decode()


def _time_ns(value: Any) -> int:
    # Reject impossible times here, with an error that is caught. The OTLP classes raise others.
    time_ns = int(value)
    if not 0 <= time_ns < 2**63:
        raise ValueError(f"{time_ns} is no time")
    return time_ns


def _attributes(labels: Labels, content: dict[str, Any], field: int) -> bytes:
    attributes = content.get("attributes")
    found: dict[str, Any] = {}
    if isinstance(attributes, dict):
        found.update((key, value) for key, value in attributes.items() if value is not None)
    if content.get("step") is not None:
        found["step"] = int(content["step"])
    if content.get("exception"):
        found["error.type"] = str(content["exception"][0])
    # Add our labels last, so that a user's attribute of the same name cannot replace them.
    found.update(labels)
    return encode.attribute_bytes(found, field)
