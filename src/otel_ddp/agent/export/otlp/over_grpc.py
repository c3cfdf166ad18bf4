"""Sends OTLP over gRPC: the official exporters with a stub that keeps the outcome of the call.

This module imports grpc, which takes 15 MiB and 80 ms: it is imported only where gRPC is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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

from otel_ddp.agent.export.otlp.addresses import is_loopback, take_user, without_credentials
from otel_ddp.agent.export.otlp.outcome import (
    Outcome,
    Signal,
    accepted,
    one_line,
)
from otel_ddp.agent.export.otlp.variables import ENVIRONMENT
from otel_ddp.settings import SIGNALS

_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
# What these say may be about the request, or about the server. INVALID_ARGUMENT alone is certain.
_DOUBTFUL = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
_CREDENTIALS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
_BAD_HEADER = Outcome("retry", "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent")


def _prepared(exporter: Any, request: Any) -> Any:
    """The class of an exporter that is given bytes instead of the SDK's data."""

    class Prepared(exporter):  # type: ignore[misc]
        stub: RecordingStub
        _client: Any

        def _translate_data(self, data: bytes) -> Any:
            return request.FromString(data)

        def _count_data(self, data: bytes) -> int:
            # Only for the exporter's own metrics, which are not used here.
            return 0

        def _initialize_channel_and_stub(self) -> None:
            super()._initialize_channel_and_stub()
            self.stub = self._client = RecordingStub(self._client)

    return Prepared


_EXPORTER: dict[Signal, Any] = {
    "metrics": _prepared(OTLPMetricExporter, ExportMetricsServiceRequest),
    "traces": _prepared(OTLPSpanExporter, ExportTraceServiceRequest),
    "logs": _prepared(OTLPLogExporter, ExportLogsServiceRequest),
}


class RecordingStub:
    """Replaces the exporter's stub, and keeps the reply or the error of the last call."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.reply: Any = None
        self.error: grpc.RpcError | None = None

    def Export(self, **call: Any) -> None:
        self.reply = self.error = None
        try:
            self.reply = self._stub.Export(**call)
        except grpc.RpcError as error:
            # Not raised: the exporter would sleep and try again, which the delivery does.
            self.error = error


class GrpcSender:
    """Sends the requests of one signal over gRPC."""

    def __init__(
        self,
        signal: Signal,
        url: str,
        timeout_s: float,
        compression: str,
        headers: Mapping[str, str],
        named: bool = True,
    ) -> None:
        """*headers*: those of the variables; a collector that people did not name gets none."""
        url, authorization = take_user(url)
        self._signal = signal
        self._url = url
        # Without any, the exporter would read the variables itself.
        self._hidden = [f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT"]
        if not named:
            self._hidden += [f"OTEL_EXPORTER_OTLP_{each}HEADERS" for each in SIGNALS]
        elif authorization:
            headers = {"authorization": authorization, **headers}
        self._timeout_s = timeout_s
        # Otherwise a cluster's http_proxy would be asked, and would reach its own loopback.
        options = (("grpc.enable_http_proxy", 0),) if is_loopback(url) else None
        self._arguments = {
            "endpoint": url,
            "timeout": timeout_s,
            "compression": _COMPRESSION[compression],
            "channel_options": options,
            "headers": tuple(headers.items()) if named else None,
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
            # grpc puts the metadata, and with it a token, into this error's text.
            return _BAD_HEADER
        stub = self._exporter.stub
        if stub.error is not None:
            return self._failed(stub.error)
        if stub.reply is None:
            return Outcome("retry", "the exporter sent nothing")
        partial = stub.reply.partial_success
        rejected = sum(
            number for field, number in partial.ListFields() if field.name.startswith("rejected_")
        )
        return accepted(without_credentials(self._url), rejected, partial.error_message)

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None

    def _build(self) -> Any:
        # The exporter reads the timeout's variable although it is given the timeout. It raises for
        # a text that is no number, also for an empty one.
        with ENVIRONMENT:
            hidden = {name: os.environ.pop(name) for name in self._hidden if name in os.environ}
            try:
                return _EXPORTER[self._signal](**self._arguments)
            finally:
                os.environ.update(hidden)

    def _failed(self, error: Any) -> Outcome:
        code, details = error.code(), error.details() or ""
        text = one_line(details)
        where = without_credentials(self._url)
        why = f"{code.name} from {where}"
        if code is grpc.StatusCode.UNAVAILABLE:
            # A channel waits up to two minutes before it connects again, and keeps its first
            # certificates. The delivery pauses by itself, so the next attempt gets a new channel.
            self.close()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
            return Outcome("refused", f"{why}: {text}", too_large=True)
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
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Outcome("retry", f"{why}: {self._signal} are not taken there")
        said = f"{why}: {text}" if text else why
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return Outcome("refused", said)
        # A proxy on the way that answers by HTTP has not looked at the request.
        doubtful = code in _DOUBTFUL and "http2 header with status" not in text.lower()
        return Outcome(
            *("retry", said if code in _DOUBTFUL else why),
            retry_after_s=_retry_after_s(error),
            doubtful=doubtful,
        )


def _unavailable(details: str, where: str) -> str:
    """The reason behind UNAVAILABLE, which has one code for many; its text tells them apart."""
    low, text = details.lower(), one_line(details)
    if "certificate_verify_failed" in low or "certificate verify failed" in low:
        # The reason stands behind it, and is shown as over HTTP.
        _, _, reason = low.partition("verify_failed: ")
        return f"TLS to {where} failed: certificate verify failed" + (
            f": {one_line(reason.removesuffix(': ok'))}" if reason else ""
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
        # The first is gRPC's own; the second was read from older collectors.
        for detail in Status.FromString(metadata.get("grpc-status-details-bin", b"")).details:
            detail.Unpack(info)
        info.MergeFromString(metadata.get("google.rpc.retryinfo-bin", b""))
    except DecodeError:
        return None
    if not info.HasField("retry_delay"):
        return None
    return float(max(info.retry_delay.seconds + info.retry_delay.nanos / 1e9, 0.0))
