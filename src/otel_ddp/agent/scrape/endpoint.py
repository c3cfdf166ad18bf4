"""Serves the node's /metrics, /healthz and a page for people."""

from __future__ import annotations

import errno
import html
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from weakref import WeakSet

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series
from otel_ddp.catalog import Kind

_TYPES = {
    Kind.COUNTER: "counter",
    Kind.GAUGE: "gauge",
    Kind.UPDOWN: "gauge",
    Kind.HISTOGRAM: "histogram",
}
_PORTS_TO_TRY = 64
# Longer than the loop ever waits for anything; what restarts an agent goes by it.
_STILL_S = 60.0
_CLIENT_TIMEOUT_S = 5.0


_Shown = dict[Labels, dict[str, str]]


class LedgerCollector(Collector):
    """The ledger as Prometheus families, under the names that the collector's path gives."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._shown: _Shown = {}

    def collect(self) -> Iterator[Family]:
        with self._ledger.lock:
            # The series of one logged name share their labels, and scrape after scrape is alike.
            # With 8 ranks and 900 names the ledger is locked for 20 to 60 ms instead of 130.
            before, self._shown = self._shown, {}
            return iter(
                [
                    _family(metric, rows, before, self._shown)
                    for metric, rows in self._ledger.families()
                ]
            )


def _family(metric: catalog.Metric, rows: list[Series], before: _Shown, shown: _Shown) -> Family:
    name = metric.prometheus
    counter = metric.kind is Kind.COUNTER
    base = name.removesuffix("_total") if counter else name
    family = Family(base, metric.description, _TYPES[metric.kind])
    for series in rows:
        labels = shown.get(series.labels)
        if labels is None:
            labels = before.get(series.labels) or {
                catalog.prometheus_label(key): value for key, value in series.labels
            }
            shown[series.labels] = labels
        if isinstance(series.value, Buckets):
            _histogram(family, base, labels, metric.bounds, series.value)
        elif series.value is not None:
            family.add_sample(name, labels, series.value)
    return family


def _histogram(
    family: Family,
    name: str,
    labels: dict[str, str],
    bounds: tuple[float, ...],
    value: Buckets,
) -> None:
    seen = 0.0
    for bound, count in zip((*bounds, float("inf")), value.counts, strict=True):
        seen += count
        edge = "+Inf" if bound == float("inf") else repr(float(bound))
        family.add_sample(f"{name}_bucket", {**labels, "le": edge}, seen)
    family.add_sample(f"{name}_count", labels, seen)
    family.add_sample(f"{name}_sum", labels, value.total)


class Endpoint:
    """An HTTP server of the agent; a port that is taken is not an error."""

    def __init__(
        self,
        ledger: Ledger,
        host: str,
        port: int,
        status: Callable[[], dict[str, Any]],
        still_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """*still_s*: for how long the agent's loop, which is not our thread, has not moved."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LedgerCollector(ledger))
        self._server = _bind(host, port, _handler(registry, status, still_s))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="otel-ddp-endpoint",
            daemon=True,
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        host = str(self._server.server_address[0])
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/metrics"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
        # Answers that are under way are let end, unless somebody reads one very slowly.
        deadline = time.monotonic() + 1.0
        for thread in list(self._server.answering):
            thread.join(max(deadline - time.monotonic(), 0.0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Whom there is no room for tries again a second later at the earliest, and scrapers are many.
    request_queue_size = 128
    # Two agents must never share a port: half of the scrapes would go to the wrong one.
    allow_reuse_port = False

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[Any, ...],
        handler: type[BaseHTTPRequestHandler],
    ) -> None:
        self.address_family = family
        self.answering: WeakSet[threading.Thread] = WeakSet()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks DNS for our full name; a silent nameserver takes minutes over it.
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # No file is left: who waits goes on waiting, and would be asked again at once.
            time.sleep(0.05)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.answering.add(threading.current_thread())
        super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is nobody's business."""


def _bind(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    family, address = _resolve(host)
    for attempt in range(port, min(port + _PORTS_TO_TRY, 65536)) if port else ():
        try:
            return _Server(family, (address[0], attempt, *address[2:]), handler)
        except OSError as error:  # noqa: PERF203
            # Anything else, as an address that is not ours, is the same for every port.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # Whatever the system gives us.
    return _Server(family, (address[0], 0, *address[2:]), handler)


def _resolve(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The address to listen on; asked for once, since a name may cost a nameserver's patience."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "is no host name", host) from error
    # A scraper that was told "localhost" tries 127.0.0.1, whatever stands first in /etc/hosts.
    found.sort(key=lambda each: each[0] is not socket.AF_INET)
    return found[0][0], found[0][4]


@containment.contained()
def _rendered(encoder: Callable[[CollectorRegistry], bytes], registry: CollectorRegistry) -> bytes:
    return encoder(registry)


def _handler(
    registry: CollectorRegistry,
    status: Callable[[], dict[str, Any]],
    still_s: Callable[[], float],
) -> type[BaseHTTPRequestHandler]:
    rendering = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        server_version = "otel-ddp"
        sys_version = ""
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.split("?", 1)[0]
            if path == "/metrics":
                encoder, kind = choose_encoder(self.headers.get("Accept") or "")
                with rendering:
                    body = _rendered(encoder, registry)
                if body is None:
                    why = b"it could not be rendered: the agent's log says why\n"
                    self._answer(500, "text/plain; charset=utf-8", why)
                else:
                    self._answer(200, kind, body)
            elif path == "/healthz":
                said_s = still_s()
                if said_s > _STILL_S:
                    said = f"the agent's loop has not moved for {said_s:.0f} s\n"
                    self._answer(503, "text/plain; charset=utf-8", said.encode())
                else:
                    self._answer(200, "text/plain; charset=utf-8", b"ok\n")
            elif path == "/":
                self._answer(200, "text/html; charset=utf-8", page(status()).encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"try /metrics or /healthz\n")

        do_HEAD = do_GET

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not news."""

    return Handler


def page(status: dict[str, Any]) -> str:
    """What a person sees who opens the endpoint in a browser."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(each.get(key)))}</td>" for key in _COLUMNS)
        for each in status.get("processes", [])
    )
    heads = "".join(f"<th>{key.replace('_', ' ')}</th>" for key in _COLUMNS)
    return (
        "<!doctype html><meta charset=utf-8><title>otel_ddp</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:left}"
        "</style>"
        f"<h1>otel_ddp on {html.escape(str(status.get('node', '')))}</h1>"
        f"<p>{html.escape(str(status.get('export', '')))}</p>"
        f"<table><tr>{heads}</tr>{rows}</table>"
        '<p><a href="/metrics">/metrics</a> <a href="/healthz">/healthz</a></p>'
    )


_COLUMNS = ("run", "group", "job_type", "node", "rank", "state", "step", "phase", "reason")


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
