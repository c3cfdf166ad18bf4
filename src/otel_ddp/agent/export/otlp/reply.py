"""What a collector says of a request that it has accepted."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)

from otel_ddp.agent.export.otlp import one_line
from otel_ddp.agent.queue import Outcome


def accepted_with(reply: bytes, where: str) -> Outcome:
    """The outcome of a request that was accepted: the reply says whether all of it was."""
    rejected, message = 0, ""
    # Some backends answer with text; that they accepted it is what counts.
    with contextlib.suppress(DecodeError):
        # The replies of all three services number their fields alike.
        partial = ExportMetricsServiceResponse.FromString(reply).partial_success
        rejected = max(partial.rejected_data_points, 0)
        message = one_line(partial.error_message)
    why = f"{where} accepted the rest" if rejected else f"accepted by {where}"
    return Outcome("delivered", f"{why}: {message}" if message else why, rejected=rejected)
