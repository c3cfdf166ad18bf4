"""OTLP over gRPC: the official exporters with a stub that tells us how the call went.

Importing this module imports grpc: 15 MiB and 80 ms, so only who speaks it does.
"""

from __future__ import annotations

import os
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_ddp.agent.export.otlp.outcome import Outcome, Signal, accepted, said, shown
from otel_ddp.agent.export.otlp.over_http import is_loopback

_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
_WORTH_RETRYING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_CREDENTIALS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
_BAD_HEADER = Outcome("retry", "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent")


def _prepared(exporter: Any, request: Any) -> Any:
    """An exporter that is given bytes where others are given SDK data."""

    class Prepared(exporter):  # type: ignore[misc]
        witness: Witness
        _client: Any

        def _translate_data(self, data: bytes) -> Any:
            return request.FromString(data)

        def _count_data(self, data: bytes) -> int:
            # Feeds the exporter's own metrics only, for which nobody listens here.
            return 0

        def _initialize_channel_and_stub(self) -> None:
            super()._initialize_channel_and_stub()
            self.witness = self._client = Witness(self._client)

    return Prepared


_EXPORTER: dict[Signal, Any] = {
    "metrics": _prepared(OTLPMetricExporter, ExportMetricsServiceRequest),
    "traces": _prepared(OTLPSpanExporter, ExportTraceServiceRequest),
    "logs": _prepared(OTLPLogExporter, ExportLogsServiceRequest),
}


class Witness:
    """Stands where the exporter holds its stub, and keeps what the call came to."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.reply: Any = None
        self.error: grpc.RpcError | None = None

    def Export(self, **call: Any) -> None:
        self.reply = self.error = None
        try:
            self.reply = self._stub.Export(**call)
        except grpc.RpcError as error:
            # Not raised on: the exporter would sleep and try again, which is our work.
            self.error = error


class GrpcLine:
    """One signal's way to the collector."""

    def __init__(self, signal: Signal, url: str, timeout_s: float, compression: str) -> None:
        self._signal = signal
        self._url = url
        self._timeout_s = timeout_s
        # A cluster's http_proxy would be asked for its own loopback.
        options = (("grpc.enable_http_proxy", 0),) if is_loopback(url) else None
        self._arguments = {
            "endpoint": url,
            "timeout": timeout_s,
            "compression": _COMPRESSION[compression],
            "channel_options": options,
        }
        self._exporter: Any = self._build()

    def send(self, body: bytes) -> Outcome:
        if self._exporter is None:
            self._exporter = self._build()
        try:
            self._exporter.export(body)
        except DecodeError:
            return Outcome("refused", "not an OTLP request")
        except ValueError:
            # grpc puts the metadata, and with it a token, in the text of this one.
            return _BAD_HEADER
        witness = self._exporter.witness
        if witness.error is not None:
            return self._failed(witness.error)
        if witness.reply is None:
            return Outcome("retry", "the exporter sent nothing")
        partial = witness.reply.partial_success
        rejected = sum(
            number for field, number in partial.ListFields() if field.name.startswith("rejected_")
        )
        return accepted(shown(self._url), rejected, partial.error_message)

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None

    def _build(self) -> Any:
        # The exporter reads this variable although it is told the timeout, and raises for what
        # is no number, an empty text included.
        variable = f"OTEL_EXPORTER_OTLP_{self._signal.upper()}_TIMEOUT"
        hidden = os.environ.pop(variable, None)
        try:
            return _EXPORTER[self._signal](**self._arguments)
        finally:
            if hidden is not None:
                os.environ[variable] = hidden

    def _failed(self, error: Any) -> Outcome:
        code, details = error.code(), error.details() or ""
        text = said(details)
        where = shown(self._url)
        why = f"{code.name} from {where}"
        if code is grpc.StatusCode.UNAVAILABLE:
            # A channel waits up to two minutes before it connects again, and keeps the
            # certificates it was made with. The delivery has its own patience: a new channel.
            self.close()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
            return Outcome("refused", f"{why}: {text}")
        if code in _CREDENTIALS:
            return Outcome("retry", f"{why}: token rejected (OTEL_EXPORTER_OTLP_HEADERS)")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Outcome("retry", f"no answer from {where} within {self._timeout_s:g} s")
        if code is grpc.StatusCode.UNAVAILABLE:
            return Outcome(
                "retry", _unavailable(details, where), retry_after_s=_retry_after_s(error)
            )
        if code is grpc.StatusCode.INTERNAL and details == "Invalid metadata":
            return _BAD_HEADER
        if code in _WORTH_RETRYING:
            return Outcome("retry", why, retry_after_s=_retry_after_s(error))
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Outcome("refused", f"{why}: {self._signal} are not taken there")
        return Outcome("refused", f"{why}: {text}" if text else why)


def _unavailable(details: str, where: str) -> str:
    """One code stands for all that keeps a call from arriving; its text tells which it was."""
    low, text = details.lower(), said(details)
    if "certificate_verify_failed" in low or "certificate verify failed" in low:
        # What is wrong with it stands behind; as over HTTP it is said.
        _, _, reason = low.partition("verify_failed: ")
        return f"TLS to {where} failed: certificate verify failed" + (
            f": {said(reason.removesuffix(': ok'))}" if reason else ""
        )
    if "handshake" in low or "ssl" in low:
        return f"TLS to {where} failed: {text}"
    if "refused" in low:
        return f"connection refused by {where}"
    if low.endswith("socket closed") and where.startswith("http://"):
        return f"connection closed by {where}; it may want https:// (OTEL_EXPORTER_OTLP_ENDPOINT)"
    if "resolution" in low or "resolve" in low:
        return f"the host name of {where} does not resolve"
    return f"UNAVAILABLE from {where}: {text}" if text else f"UNAVAILABLE from {where}"


def _retry_after_s(error: Any) -> float | None:
    info = RetryInfo()
    metadata = dict(error.trailing_metadata() or ())
    try:
        # The first is what gRPC says, the second what older collectors were read for.
        for detail in Status.FromString(metadata.get("grpc-status-details-bin", b"")).details:
            detail.Unpack(info)
        info.MergeFromString(metadata.get("google.rpc.retryinfo-bin", b""))
    except DecodeError:
        return None
    if not info.HasField("retry_delay"):
        return None
    return float(max(info.retry_delay.seconds + info.retry_delay.nanos / 1e9, 0.0))
