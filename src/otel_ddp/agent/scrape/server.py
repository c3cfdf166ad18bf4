"""A bounded HTTP server: few clients at a time, none for ever, and always a port."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from weakref import WeakSet

from otel_ddp.agent.scrape.web_config import WebConfig

_PORTS_TO_TRY = 64
CLIENT_TIMEOUT_S = 5.0
# A client that reads or writes a byte now and then is cut off after this.
_LONGEST_ANSWER_S = 60.0
_MOST_CLIENTS = 64


class BoundedServer(ThreadingHTTPServer):
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
                request.settimeout(CLIENT_TIMEOUT_S)
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


def bind(
    host: str, port: int, handler: type[BaseHTTPRequestHandler], rules: WebConfig | None
) -> BoundedServer:
    """A server on this port, or on the next one that is free; on any port for 0."""
    family, address = _resolve(host)
    for attempt in range(port, min(port + _PORTS_TO_TRY, 65536)) if port else ():
        try:
            return BoundedServer(family, (address[0], attempt, *address[2:]), handler, rules)
        except OSError as error:  # noqa: PERF203
            # Another error, such as an address of another machine, is the same for every port.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # Any free port.
    return BoundedServer(family, (address[0], 0, *address[2:]), handler, rules)


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
