"""A real OTLP receiver inside the test process: real sockets, real protobuf, faults on demand."""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2

from otel_ddp.agent.export.otlp import encode
from otel_ddp.vocabulary.catalog import Kind, Metric

# The fields of a request: of each resource, of each scope in it, and what is in that.
_FIELDS = {
    "metrics": ("resource_metrics", "scope_metrics", "metrics"),
    "traces": ("resource_spans", "scope_spans", "spans"),
    "logs": ("resource_logs", "scope_logs", "log_records"),
}
_RESPONSES: dict[str, Any] = {
    "metrics": metrics_service_pb2.ExportMetricsServiceResponse,
    "traces": trace_service_pb2.ExportTraceServiceResponse,
    "logs": logs_service_pb2.ExportLogsServiceResponse,
}
_REQUESTS: dict[str, Any] = {
    "metrics": metrics_service_pb2.ExportMetricsServiceRequest,
    "traces": trace_service_pb2.ExportTraceServiceRequest,
    "logs": logs_service_pb2.ExportLogsServiceRequest,
}
_GRPC_CODE = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}

Tls = tuple[Path, Path]


@dataclass(frozen=True)
class Received:
    """One request that was accepted."""

    signal: str
    headers: Mapping[str, str]
    message: Any


class Point(NamedTuple):
    """One data point; `value` is a number, or a HistogramDataPoint."""

    metric: str
    kind: str
    unit: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    time_ns: int
    start_ns: int
    value: Any


def points_in(*bodies: bytes) -> list[Point]:
    """Every point of these requests, in their order."""
    return [each for body in bodies for each in _points_of(_parsed("metrics", body))]


def gauges(*series: tuple[str, int, float], **resource: str) -> bytes:
    """A request with one point each: of this metric, rank and value."""
    metrics = [
        part
        for name, rank, value in series
        for part in encode.metric(
            Metric(name, Kind.GAUGE, "", "", (), "rank", "", (), name),
            [encode.number_point(encode.attribute_bytes({"rank": rank}), 17, value)],
        )
    ]
    scope = encode.in_scope("otel_ddp", "1", metrics)
    return encode.request(encode.resource_bytes(resource), scope)


def contents_in(signal: str, *bodies: bytes) -> list[Any]:
    """The metrics, spans or log records of these requests, as the official messages."""
    return [each for body in bodies for each in _contents(signal, _parsed(signal, body))]


class Receiver:
    """Answers OTLP as `mode` says: "ok", "hang", "partial" (of metrics) or a status code."""

    def __init__(self) -> None:
        self.retry_after: str | None = None
        """What a 429 or 503 asks for over HTTP."""
        self.requests: list[Received] = []
        self.attempts: list[str] = []
        """The signal of every request that came in, whatever became of it."""
        self.hanging = 0
        self._modes: dict[str, str | int] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._http: list[tuple[_HttpServer, threading.Thread]] = []
        self._grpc: list[tuple[Any, ThreadPoolExecutor]] = []

    # ------------------------------------------------------------------ life

    def start_http(self, port: int = 0, *, tls: Tls | None = None, host: str = "127.0.0.1") -> str:
        server = _HttpServer(self, (host, port), tls)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="otlp-http")
        thread.start()
        self._http.append((server, thread))
        return f"http{'s' if tls else ''}://{host}:{server.server_address[1]}"

    def start_grpc(self, port: int = 0, *, tls: Tls | None = None) -> str:
        pool = ThreadPoolExecutor(8, thread_name_prefix="otlp-grpc")
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
            _Servicer(self, "metrics"), server
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(self, "traces"), server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Servicer(self, "logs"), server)
        address = f"127.0.0.1:{port}"
        if tls:
            certificate, key = tls
            credentials = grpc.ssl_server_credentials(
                [(key.read_bytes(), certificate.read_bytes())]
            )
            bound = server.add_secure_port(address, credentials)
        else:
            bound = server.add_insecure_port(address)
        server.start()
        self._grpc.append((server, pool))
        return f"http{'s' if tls else ''}://127.0.0.1:{bound}"

    def close(self) -> None:
        self._closing.set()
        for server, thread in self._http:
            server.shutdown()
            server.drop_connections()
            server.server_close()
            thread.join()
        for grpc_server, pool in self._grpc:
            grpc_server.stop(None).wait()
            pool.shutdown()
        self._http.clear()
        self._grpc.clear()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ faults

    def set_mode(self, mode: str | int, signal: str | None = None) -> None:
        """From now on; for one signal, or for all of them."""
        with self._changed:
            if signal is None:
                self._modes.clear()
            self._modes[signal or ""] = mode

    # ------------------------------------------------------------------ what came in

    def wait_for(self, predicate: Callable[[Receiver], bool], timeout_s: float = 180.0) -> bool:
        """Until the predicate holds; it is asked again whenever something came in."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self), timeout_s)

    def points(self) -> list[Point]:
        return [point for point in self._points() if point.value is not None]

    def ended(self) -> set[tuple[str, str]]:
        """The series whose newest point has no value: metric and attributes, as text."""
        newest: dict[tuple[str, str], Point] = {}
        for point in self._points():
            newest[point.metric, str(sorted(point.attributes.items()))] = point
        return {key for key, point in newest.items() if point.value is None}

    def _points(self) -> list[Point]:
        return [point for each in self._messages("metrics") for point in _points_of(each)]

    def spans(self) -> list[Any]:
        """The official span messages."""
        return [span for each in self._messages("traces") for span in _contents("traces", each)]

    def logs(self) -> list[Any]:
        """The official log record messages."""
        return [record for each in self._messages("logs") for record in _contents("logs", each)]

    def _messages(self, signal: str) -> list[Any]:
        return [each.message for each in list(self.requests) if each.signal == signal]

    # ------------------------------------------------------------------ for the servers

    def came_in(self, signal: str) -> str | int:
        with self._changed:
            self.attempts.append(signal)
            self._changed.notify_all()
            return self._modes.get(signal, self._modes.get("", "ok"))

    def hold(self) -> None:
        """Keep a request waiting until the receiver is closed."""
        with self._changed:
            self.hanging += 1
            self._changed.notify_all()
        self._closing.wait()
        with self._changed:
            self.hanging -= 1
            self._changed.notify_all()

    def accept(self, received: Received) -> None:
        with self._changed:
            self.requests.append(received)
            self._changed.notify_all()

    def reply(self, signal: str, mode: str | int) -> Any:
        response = _RESPONSES[signal]()
        if mode == "partial":
            response.partial_success.error_message = "out of order"
            response.partial_success.rejected_data_points = 3
        return response


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, receiver: Receiver, address: tuple[str, int], tls: Tls | None) -> None:
        self.receiver = receiver
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*tls)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._context:
            # The handshake happens at the first read, in the connection's own thread.
            connection = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        with self._lock:
            self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        """Wakes the threads that wait for a client's next request."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    # Of the plain socket: a TLS goodbye would wait for the other side.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are what half of the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    def do_POST(self) -> None:
        receiver = self.server.receiver
        wire = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signal = self.path.rpartition("/")[2]
        if signal not in _REQUESTS:
            self._answer(404, b"", "text/plain")
            return
        mode = receiver.came_in(signal)
        if mode == "hang":
            receiver.hold()
            self.close_connection = True
            return
        if isinstance(mode, int):
            wish = receiver.retry_after
            self._answer(
                mode,
                Status(code=3, message=f"told to say {mode}").SerializeToString(),
                "application/x-protobuf",
                {"Retry-After": wish} if wish and mode in (429, 503) else {},
            )
            return
        is_packed = self.headers.get("Content-Encoding") == "gzip"
        received = Received(
            signal=signal,
            headers={name.lower(): text for name, text in self.headers.items()},
            message=_parsed(signal, gzip.decompress(wire) if is_packed else wire),
        )
        receiver.accept(received)
        reply = receiver.reply(signal, mode).SerializeToString()
        self._answer(200, reply, "application/x-protobuf")

    def _answer(
        self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A test's output is not the place."""


class _Servicer:
    """The same answers over gRPC, for one signal."""

    def __init__(self, receiver: Receiver, signal: str) -> None:
        self._receiver = receiver
        self._signal = signal

    def Export(self, request: Any, context: Any) -> Any:
        receiver, signal = self._receiver, self._signal
        mode = receiver.came_in(signal)
        if mode == "hang":
            receiver.hold()
            context.abort(grpc.StatusCode.UNAVAILABLE, "closing")
        if isinstance(mode, int):
            too_large = "; received message larger than max" if mode == 413 else ""
            context.abort(_GRPC_CODE[mode], f"told to say {mode}{too_large}")
        headers = dict(context.invocation_metadata())
        receiver.accept(Received(signal, headers, request))
        return receiver.reply(signal, mode)


def attributes_of(pairs: Any) -> dict[str, Any]:
    """The values of attributes, by their names."""
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in pairs
    }


def _parsed(signal: str, body: bytes) -> Any:
    return _REQUESTS[signal].FromString(body)


def _contents(signal: str, message: Any) -> list[Any]:
    resources, scopes, contents = _FIELDS[signal]
    return [
        each
        for of_resource in getattr(message, resources)
        for of_scope in getattr(of_resource, scopes)
        for each in getattr(of_scope, contents)
    ]


def _points_of(message: Any) -> list[Point]:
    return [
        point
        for of_resource in message.resource_metrics
        for of_scope in of_resource.scope_metrics
        for metric in of_scope.metrics
        for point in _points(metric, attributes_of(of_resource.resource.attributes))
    ]


def _points(metric: Any, resource: dict[str, Any]) -> list[Point]:
    shape = metric.WhichOneof("data")
    data = getattr(metric, shape)
    kind = shape
    if shape == "sum":
        kind = "counter" if data.is_monotonic else "updown"
    return [
        Point(
            metric=metric.name,
            kind=kind,
            unit=metric.unit,
            attributes=attributes_of(point.attributes),
            resource=resource,
            time_ns=point.time_unix_nano,
            start_ns=point.start_time_unix_nano,
            value=_value(point, shape),
        )
        for point in data.data_points
    ]


def _value(point: Any, shape: str) -> Any:
    """None ends a series."""
    if point.flags & metrics_pb2.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK:
        return None
    return point if shape == "histogram" else getattr(point, point.WhichOneof("value"))
