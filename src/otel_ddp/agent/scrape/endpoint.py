"""Serves the node's /metrics, /healthz and a page for people over HTTP."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from weakref import WeakSet

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from otel_ddp import containment
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.scrape.families import LedgerCollector
from otel_ddp.agent.scrape.page import render_page
from otel_ddp.agent.scrape.web_config import WebConfig

_PORTS_TO_TRY = 64
# Only where shutting the socket down does not wake the thread is this how long a stop may take.
_POLL_S = 1.0
# Longer than the agent's loop ever waits; a supervisor restarts an agent that is stuck.
_STUCK_S = 60.0
_CLIENT_TIMEOUT_S = 5.0
# A client that reads or writes a byte now and then is cut off after this.
_LONGEST_ANSWER_S = 60.0
_MOST_CLIENTS = 64


class Endpoint:
    """An HTTP server of the agent; where the port is taken, it uses the next free one."""

    def __init__(
        self,
        ledger: Ledger,
        host: str,
        port: int,
        status: Callable[[], dict[str, Any]],
        idle_s: Callable[[], float] = lambda: 0.0,
        problems: Callable[[], Sequence[str]] = list,
        rules: WebConfig | None = None,
    ) -> None:
        """*idle_s*: for how long the agent's loop, which runs in another thread, has not moved.

        *problems*: what else does not run in the agent.
        *rules*: who may read it, and how; None: everyone, without encryption.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LedgerCollector(ledger))
        handler = _handler(registry, status, idle_s, problems, rules)
        self._server = _bind(host, port, handler, rules)
        self._scheme = "http" if rules is None or rules.tls() is None else "https"
        self.thread = KeptThread("endpoint", lambda: self._server.serve_forever(_POLL_S))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        host = str(self._server.server_address[0])
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{shown}:{self.port}/metrics"

    def start(self) -> None:
        self.thread.keep_running()

    def stop(self) -> None:
        # Wakes the thread, so that it need not poll often.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        if self.thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self.thread.join(2.0)
        # Answers that are being sent may end, unless a client reads very slowly.
        deadline = time.monotonic() + 1.0
        for thread in list(self._server.answering):
            thread.join(max(deadline - time.monotonic(), 0.0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A client that finds no room here tries again after a second at the earliest.
    request_queue_size = 128
    # Two agents must never share a port: half of the scrapes would go to the wrong one.
    allow_reuse_port = False

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[Any, ...],
        handler: type[BaseHTTPRequestHandler],
        rules: WebConfig | None,
    ) -> None:
        self.address_family = family
        self.answering: WeakSet[threading.Thread] = WeakSet()
        self._rules = rules
        # Each connection, and since when it is open.
        self._clients: dict[Any, float] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks DNS for our full name: with a silent name server that takes minutes.
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # No file descriptor is left: without a pause, accept would be called again at once.
            time.sleep(0.05)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._clients) >= _MOST_CLIENTS:
            self.shutdown_request(request)
            return
        context = None if self._rules is None else self._rules.tls()
        if context is not None:
            # The handshake waits for the client, so it belongs to the client's own thread.
            request = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        self._clients[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread could be started. Our caller only knows the socket that TLS has replaced.
            self.shutdown_request(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.answering.add(threading.current_thread())
        if isinstance(request, ssl.SSLSocket):
            try:
                request.settimeout(_CLIENT_TIMEOUT_S)
                request.do_handshake()
            except OSError:
                self.shutdown_request(request)
                return
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called about every second: a timeout of the socket alone begins anew with each byte."""
        now = time.monotonic()
        for request, since in list(self._clients.items()):
            if now - since > _LONGEST_ANSWER_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not logged: clients may disconnect at any time."""


def _bind(
    host: str, port: int, handler: type[BaseHTTPRequestHandler], rules: WebConfig | None
) -> _Server:
    family, address = _resolve(host)
    for attempt in range(port, min(port + _PORTS_TO_TRY, 65536)) if port else ():
        try:
            return _Server(family, (address[0], attempt, *address[2:]), handler, rules)
        except OSError as error:  # noqa: PERF203
            # Another error, such as an address of another machine, is the same for every port.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # Any free port.
    return _Server(family, (address[0], 0, *address[2:]), handler, rules)


def _resolve(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The address to listen on; resolved once, because a name server may be slow."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "is no host name", host) from error
    # A scraper that is configured with "localhost" tries 127.0.0.1, whatever /etc/hosts has.
    found.sort(key=lambda each: each[0] is not socket.AF_INET)
    return found[0][0], found[0][4]


@containment.contained()
def _render(encoder: Callable[[CollectorRegistry], bytes], registry: CollectorRegistry) -> bytes:
    return encoder(registry)


def _handler(
    registry: CollectorRegistry,
    status: Callable[[], dict[str, Any]],
    idle_s: Callable[[], float],
    problems: Callable[[], Sequence[str]],
    rules: WebConfig | None,
) -> type[BaseHTTPRequestHandler]:
    rendering = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        server_version = "otel-ddp"
        sys_version = ""
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.split("?", 1)[0]
            # A probe has no password, and learns only whether the agent is well.
            if path != "/healthz" and not self._is_admitted():
                self._answer(401, "text/plain; charset=utf-8", b"name yourself\n")
            elif path == "/metrics":
                encoder, kind = choose_encoder(self.headers.get("Accept") or "")
                with rendering:
                    body = _render(encoder, registry)
                if body is None:
                    why = b"it could not be rendered: the agent's log says why\n"
                    self._answer(500, "text/plain; charset=utf-8", why)
                else:
                    self._answer(200, kind, body)
            elif path == "/healthz":
                stuck_s = idle_s()
                lines = list(problems())
                if stuck_s > _STUCK_S:
                    lines.insert(0, f"the agent's loop has not moved for {stuck_s:.0f} s")
                if lines:
                    text = "".join(f"{line}\n" for line in lines)
                    self._answer(503, "text/plain; charset=utf-8", text.encode())
                else:
                    self._answer(200, "text/plain; charset=utf-8", b"ok\n")
            elif path == "/":
                self._answer(200, "text/html; charset=utf-8", self._page())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"try /metrics or /healthz\n")

        do_HEAD = do_GET

        def _is_admitted(self) -> bool:
            return rules is None or rules.admits(self.headers.get("Authorization") or "")

        def _page(self) -> bytes:
            return render_page(status()).encode("utf-8", "replace")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if code == HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", 'Basic realm="otel-ddp", charset="UTF-8"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not logged."""

    return Handler
