"""Sends OTLP requests over gRPC.

Imported only if gRPC is configured, since importing grpc takes 15 MiB and 80 ms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from otel_ddp import __version__
from otel_ddp.agent.export.delivery import Outcome
from otel_ddp.agent.export.otlp.encode import accepted_with, answered
from otel_ddp.agent.export.otlp.variables import Variables
from otel_ddp.agent.export.post import is_loopback, one_line, without_credentials

_METHODS = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
# The HTTP status code for each gRPC code, 503 for the others. Codes that either the request or the
# server may cause, such as INTERNAL, become 500.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNIMPLEMENTED: 404,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.NOT_FOUND: 500,
    grpc.StatusCode.ALREADY_EXISTS: 500,
    grpc.StatusCode.FAILED_PRECONDITION: 500,
}
_BAD_HEADER = Outcome("retry", "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent")


class GrpcSender:
    """Sends the requests of one signal over gRPC."""

    def __init__(self, there: Variables) -> None:
        self._signal, self._url = there.signal, there.url
        self._timeout_s = there.timeout_s()
        self._metadata = tuple(there.headers().items())
        options: list[tuple[str, Any]] = [("grpc.primary_user_agent", f"otel_ddp/{__version__}")]
        if is_loopback(self._url):
            # No proxy for a loopback address: it would connect to its own machine instead of ours.
            options.append(("grpc.enable_http_proxy", 0))
        is_packed = there.compression() == "gzip"
        compression = grpc.Compression.Gzip if is_packed else grpc.Compression.NoCompression
        parts = urlsplit(self._url)
        target = parts.netloc or self._url
        if parts.scheme == "http" or (not parts.netloc and there.insecure()):
            self._channel = grpc.insecure_channel(target, options, compression)
        else:
            files = [Path(path).read_bytes() if path else None for path in there.tls_files()]
            credentials = grpc.ssl_channel_credentials(*files)
            self._channel = grpc.secure_channel(target, credentials, options, compression)

    def send(self, body: bytes) -> Outcome:
        try:
            reply = self._channel.unary_unary(_METHODS[self._signal])(
                body, timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            return self._failed(error)
        except ValueError:
            # Omit the error's text: it contains the metadata, which may include a token.
            return _BAD_HEADER
        return accepted_with(reply, without_credentials(self._url))

    def close(self) -> None:
        self._channel.close()

    def _failed(self, error: Any) -> Outcome:
        code, details = error.code(), error.details() or ""
        # Drop the text before "last error: ". It describes earlier attempts of the channel.
        text = one_line(details.rpartition("last error: ")[2])
        where = without_credentials(self._url)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Outcome("retry", f"no answer from {where} within {self._timeout_s:g} s")
        if code is grpc.StatusCode.INTERNAL and details == "Invalid metadata":
            return _BAD_HEADER
        status = _STATUSES.get(code, 503)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
            status = 413
        elif status == 500 and "http2 header with status" in text.lower():
            # A proxy has answered in plain HTTP. The server has not read the request, so retry.
            status = 503
        return answered(status, f"{code.name} from {where}", text, self._signal, 0.0)
