"""Renders spans as traces and events as log records: OTLP requests of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from otel_ddp import __version__
from otel_ddp.agent.export.otlp import resource
from otel_ddp.agent.export.otlp.encode import (
    EVENT_ATTRIBUTES,
    LOG_ATTRIBUTES,
    SCOPE,
    SPAN_ATTRIBUTES,
    attribute_bytes,
    element,
    in_parts,
    in_scope,
    request,
    resource_bytes,
    utf8,
)
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.queue.folder import Request
from otel_ddp.journal import layout
from otel_ddp.journal.layout import SPAN
from otel_ddp.journal.parser import Document

_MOST_MESSAGES = 500
_MOST_STEP_TRACES = 4096
_S = 10**9
# In steps of four, as the specification has them.
_SEVERITIES = {"INFO": 9, "WARN": 13, "ERROR": 17, "FATAL": 21}


class _Message(NamedTuple):
    """A span or a log record."""

    content: bytes
    """As an element of its scope."""
    time_ns: int


def _message(time_ns: int, content: trace_pb2.Span | logs_pb2.LogRecord) -> _Message:
    return _Message(element(2, bytes(content.SerializeToString())), time_ns)


class Documents:
    """Renders for one resource; each project gets a resource of its own."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._attributes = attributes
        # By run and name: the traces of steps whose first span was made, the latest ones.
        self._step_traces: dict[tuple[str, str], None] = {}

    def render(
        self, documents_of: Iterable[tuple[Labels, str, Sequence[Document]]]
    ) -> list[Request]:
        """The requests; a document that OTLP cannot express is left out alone."""
        found: dict[tuple[str, str], list[_Message]] = {}
        for labels, project, documents in documents_of:
            for each in documents:
                signal = "traces" if each.kind == SPAN else "logs"
                make = self._spans if each.kind == SPAN else _log_records
                try:
                    messages = list(make(labels, each.content))
                except (KeyError, TypeError, ValueError, OverflowError):
                    continue  # a record of another version
                found.setdefault((signal, project), []).extend(messages)
        return [
            Request(
                *(signal, self._body(project, part), len(part)),
                oldest_s=min(each.time_ns for each in part) // _S,
            )
            for (signal, project), messages in found.items()
            for part in in_parts(messages, _MOST_MESSAGES)
        ]

    def _spans(self, labels: Labels, content: dict[str, Any]) -> Iterator[_Message]:
        """The span, behind the first one of its trace where no rank has been in that before."""
        run, trace = dict(labels).get("run", ""), str(content.get("trace") or "")
        span = _span(run, trace, labels, content)
        if not span.parent_span_id and layout.is_of_step(trace):
            # Ranks of other nodes may be in this trace. Their agents make this very span too.
            span.parent_span_id = layout.first_span_id(run, trace)
            if (run, trace) not in self._step_traces:
                self._step_traces[run, trace] = None
                if len(self._step_traces) > _MOST_STEP_TRACES:
                    del self._step_traces[next(iter(self._step_traces))]
                whole: dict[str, Any] = {"name": "global step", "id": span.parent_span_id.hex()}
                whole |= {key: content.get(key) for key in ("start", "end", "step")}
                yield _message(span.start_time_unix_nano, _span(run, trace, labels, whole))
        yield _message(span.start_time_unix_nano, span)

    def _body(self, project: str, messages: Sequence[_Message]) -> bytes:
        scope = in_scope(SCOPE, __version__, [each.content for each in messages])
        return request(resource_bytes(resource.with_project(self._attributes, project)), scope)


def _span(run: str, trace: str, labels: Labels, content: dict[str, Any]) -> trace_pb2.Span:
    span = trace_pb2.Span(
        name=_clean(content["name"]),
        trace_id=layout.trace_id(run, trace),
        span_id=bytes.fromhex(content["id"]),
        parent_span_id=bytes.fromhex(content.get("parent") or ""),
        start_time_unix_nano=_time_ns(content["start"]),
        end_time_unix_nano=_time_ns(content["end"]),
        kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
        # The parent is known to be in the same process.
        flags=trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
    )
    span.MergeFromString(attribute_bytes(_attributes(labels, content), SPAN_ATTRIBUTES))
    if content.get("error"):
        span.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        span.status.message = _clean(content["error"])
    if link := content.get("link"):
        span.links.add(trace_id=layout.trace_id(run, str(link[0])), span_id=bytes.fromhex(link[1]))
    if content.get("exception"):
        event = span.events.add(name="exception", time_unix_nano=_time_ns(content["end"]))
        event.MergeFromString(attribute_bytes(_exception(content), EVENT_ATTRIBUTES))
    return span


def _exception(content: dict[str, Any]) -> dict[str, Any]:
    """The attributes of the exception that ended a span."""
    _, full_name = content["exception"]
    said = str(content.get("error") or "").partition(": ")[2]
    message = {"exception.message": said} if said else {}
    return {"exception.type": str(full_name), **message}


def _log_records(labels: Labels, content: dict[str, Any]) -> Iterator[_Message]:
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
    record.MergeFromString(attribute_bytes(_attributes(labels, content), LOG_ATTRIBUTES))
    yield _message(time_ns, record)


def _clean(text: Any) -> str:
    return utf8(str(text)).decode()


def _time_ns(value: Any) -> int:
    # The OTLP classes raise for any other number, and the whole request would be lost.
    time_ns = int(value)
    if not 0 <= time_ns < 2**63:
        raise ValueError(f"{time_ns} is no time")
    return time_ns


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
