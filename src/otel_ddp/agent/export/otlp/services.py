"""The three services of OTLP: what each takes, what it answers, and its name for gRPC."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from otel_ddp.agent.export.otlp.outcome import Outcome, Signal, accepted


class Service(NamedTuple):
    """One of them."""

    method: str
    request: Any
    response: Any


_COLLECTOR = "/opentelemetry.proto.collector"
SERVICES: dict[Signal, Service] = {
    "metrics": Service(
        f"{_COLLECTOR}.metrics.v1.MetricsService/Export",
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
    "traces": Service(
        f"{_COLLECTOR}.trace.v1.TraceService/Export",
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
    ),
    "logs": Service(
        f"{_COLLECTOR}.logs.v1.LogsService/Export",
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
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
