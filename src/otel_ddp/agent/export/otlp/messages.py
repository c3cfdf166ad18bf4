"""OTLP's messages: the three services, what a reply says, and how a request is halved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from otel_ddp.agent.export.otlp import Outcome, Signal, accepted


class Service(NamedTuple):
    """One of them."""

    method: str
    request: Any
    response: Any
    resources: str
    """The fields of a request: of each resource, of each scope in it, and what is in that."""
    scopes: str
    contents: str


_COLLECTOR = "/opentelemetry.proto.collector"
SERVICES: dict[Signal, Service] = {
    "metrics": Service(
        f"{_COLLECTOR}.metrics.v1.MetricsService/Export",
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
        *("resource_metrics", "scope_metrics", "metrics"),
    ),
    "traces": Service(
        f"{_COLLECTOR}.trace.v1.TraceService/Export",
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
        *("resource_spans", "scope_spans", "spans"),
    ),
    "logs": Service(
        f"{_COLLECTOR}.logs.v1.LogsService/Export",
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
        *("resource_logs", "scope_logs", "log_records"),
    ),
}


def accepted_with(signal: Signal, reply: bytes, where: str) -> Outcome:
    """The outcome of a request that was accepted: the reply says whether all of it was."""
    try:
        partial = SERVICES[signal].response.FromString(reply).partial_success
    except DecodeError:
        # Some backends answer with text; that they accepted it is what counts.
        return accepted(where, 0, "")
    rejected = sum(
        number for field, number in partial.ListFields() if field.name.startswith("rejected_")
    )
    return accepted(where, rejected, partial.error_message)


class Piece(NamedTuple):
    """A request, or a part of one that was split."""

    body: bytes
    points: int


def halves(signal: Signal, body: bytes) -> list[Piece]:
    """Two requests with the same content; none if there is only one point, span or record."""
    try:
        whole = SERVICES[signal].request.FromString(body)
    except DecodeError:
        return []
    count = sum(map(len, _contents(signal, whole)))
    middle = count // 2
    parts = [range(middle), range(middle, count)] if middle else []
    return [Piece(_only(signal, body, part), len(part)) for part in parts]


def _contents(signal: Signal, message: Any) -> Iterator[Any]:
    """The lists of points, spans or records of a request."""
    service = SERVICES[signal]
    for of_resource in getattr(message, service.resources):
        for of_scope in getattr(of_resource, service.scopes):
            content = getattr(of_scope, service.contents)
            if signal == "metrics":
                yield from map(_points, content)
            else:
                yield content


def _points(metric: Any) -> Any:
    """The list of a metric's points."""
    shape = metric.WhichOneof("data")
    return getattr(metric, shape).data_points if shape else []


def _only(signal: Signal, body: bytes, kept: range) -> bytes:
    """The request with these points alone, counted through all of it."""
    message = SERVICES[signal].request.FromString(body)
    begin = 0
    for content in _contents(signal, message):
        end = begin + len(content)
        del content[max(kept.stop - begin, 0) :]
        del content[: max(kept.start - begin, 0)]
        begin = end
    if signal == "metrics":
        for of_resource in message.resource_metrics:
            for of_scope in of_resource.scope_metrics:
                filled = [each for each in of_scope.metrics if _points(each)]
                del of_scope.metrics[:]
                of_scope.metrics.extend(filled)
    return bytes(message.SerializeToString())
