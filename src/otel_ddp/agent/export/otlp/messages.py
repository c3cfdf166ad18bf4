"""OTLP's messages: the three services, what a reply says, and how a request is halved."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from otel_ddp.agent.export.otlp import one_line
from otel_ddp.agent.queue import Outcome, Piece


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
SERVICES: dict[str, Service] = {
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


def accepted_with(signal: str, reply: bytes, where: str) -> Outcome:
    """The outcome of a request that was accepted: the reply says whether all of it was."""
    rejected, message = 0, ""
    # Some backends answer with text; that they accepted it is what counts.
    with contextlib.suppress(DecodeError):
        partial = SERVICES[signal].response.FromString(reply).partial_success
        fields = {field.name: number for field, number in partial.ListFields()}
        message = one_line(fields.pop("error_message", ""))
        rejected = max(sum(fields.values()), 0)
    why = f"{where} accepted the rest" if rejected else f"accepted by {where}"
    return Outcome("delivered", f"{why}: {message}" if message else why, rejected=rejected)


def halves(signal: str, body: bytes) -> list[Piece]:
    """Two requests with the same content; none if there is only one point, span or record."""
    service = SERVICES[signal]
    try:
        parts = [service.request.FromString(body), service.request.FromString(body)]
    except DecodeError:
        return []
    first, second = (_divisible(service, part) for part in parts)
    middle = len(first) // 2
    if not middle:
        return []
    del first[middle:]
    del second[:middle]
    return [Piece(bytes(part.SerializeToString()), _count(service, part)) for part in parts]


def _divisible(service: Service, message: Any) -> Any:
    """The outermost list of a request with several parts, or else its innermost one."""
    found: Any = []
    for field in (service.resources, service.scopes, service.contents):
        found = getattr(message, field)
        if len(found) != 1:
            return found
        message = found[0]
    return _points(message) if service.contents == "metrics" else found


def _count(service: Service, message: Any) -> int:
    """How many points, spans or records a request has."""
    contents = [
        content
        for of_resource in getattr(message, service.resources)
        for of_scope in getattr(of_resource, service.scopes)
        for content in getattr(of_scope, service.contents)
    ]
    return sum(len(_points(each)) if service.contents == "metrics" else 1 for each in contents)


def _points(metric: Any) -> Any:
    """The list of a metric's points."""
    shape = metric.WhichOneof("data")
    return getattr(metric, shape).data_points if shape else []
