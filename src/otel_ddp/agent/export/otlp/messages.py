"""OTLP's three services: where requests go, and what a reply says."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from otel_ddp.agent.export.otlp import one_line
from otel_ddp.agent.queue import Outcome


class Service(NamedTuple):
    """One of them."""

    method: str
    response: Any


_COLLECTOR = "/opentelemetry.proto.collector"
SERVICES: dict[str, Service] = {
    "metrics": Service(
        f"{_COLLECTOR}.metrics.v1.MetricsService/Export",
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
    "traces": Service(
        f"{_COLLECTOR}.trace.v1.TraceService/Export",
        trace_service_pb2.ExportTraceServiceResponse,
    ),
    "logs": Service(
        f"{_COLLECTOR}.logs.v1.LogsService/Export",
        logs_service_pb2.ExportLogsServiceResponse,
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
