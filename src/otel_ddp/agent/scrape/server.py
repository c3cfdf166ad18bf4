"""A bounded HTTP server: few clients at a time, none for ever, and who may read what."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hmac
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from weakref import WeakSet

from otel_ddp.history.page import http
from otel_ddp.history.page.app import App
from otel_ddp.history.page.http import Answer, Question, Refused, as_text

INSECURE = "insecure"
_PROC = Path("/proc/net")
_ESTABLISHED = "01"
_ROOT = 0
_PIECE = 65536

End = tuple[IPv4Address | IPv6Address, int]
"""An address and a port."""


class NoToken(Exception):
    """The endpoint cannot be served like this; the text says why."""


def find_token(setting: str, host: str) -> bytes:
    """The token that an endpoint on this host asks for, empty if none. Raises NoToken."""
    if setting.lower() == INSECURE:
        return b""
    if setting:
        return _read_token(Path(setting))
    if ip_address(host).is_loopback:
        return b""
    raise NoToken(
        f"{host} is reached from other machines: set OTEL_DDP_SCRAPE_TOKEN_FILE to a file with a "
        f"token (docs/page.md#scrape-metrics), or to {INSECURE} if everyone may read what is served"
    )


def _read_token(path: Path) -> bytes:
    try:
        token = path.read_bytes().strip()
        why = "" if token else "is empty"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    if why:
        raise NoToken(f"OTEL_DDP_SCRAPE_TOKEN_FILE names {path}, which {why}")
    return token


def admits(token: bytes, authorization: str) -> bool:
    """Whether a request with this header may be answered."""
    kind, _, given = authorization.partition(" ")
    return not token or hmac.compare_digest(_given_token(kind.lower(), given), token)


def _given_token(kind: str, given: str) -> bytes:
    if kind == "bearer":
        return given.strip().encode()
    # A browser asks a person for a name and a password: the token is the password.
    if kind == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    return b""


# -- which user asks


def is_own(peer: tuple[str, int], own: tuple[str, int], proc: Path = _PROC) -> bool:
    """Whether our own user or root holds the other end of a connection; False if unknown.

    *peer* and *own*: both addresses of the connection, with their ports.
    """
    theirs = _plain(ip_address(peer[0].partition("%")[0])), peer[1]
    ours = _plain(ip_address(own[0].partition("%")[0])), own[1]
    if not theirs[0].is_loopback:
        return False
    owners = (user for ends, user in _connections(proc, own[1]) if ends == (theirs, ours))
    return next(owners, None) in (_ROOT, os.geteuid())


def _connections(proc: Path, port: int) -> Iterator[tuple[tuple[End, End], int]]:
    """The connections with this port at an end: their ends, and the user who holds the first."""
    # Most rows of a busy node are of no interest: reading one out takes 20 times as long.
    wanted = b":%04X " % port
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(proc / name, "rb", buffering=_PIECE) as file:
            for fields in (line.decode().split() for line in file if wanted in line):
                # A socket that its process has closed has no inode, and says that root owns it.
                if fields[3] == _ESTABLISHED and fields[9] != "0":
                    yield (_end(fields[1]), _end(fields[2])), int(fields[7])


def _end(text: str) -> End:
    """As /proc/net has it."""
    address, _, port = text.partition(":")
    # The kernel writes words of four bytes in the machine's own order.
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    found = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return _plain(found), int(port, 16)


def _plain(found: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """An IPv4 address that an IPv6 socket has is that address."""
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found


_PORTS_TO_TRY = 64
CLIENT_TIMEOUT_S = 5.0
_MOST_CLIENTS = 64


class BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    # A client that finds no room here tries again after a second at the earliest.
    request_queue_size = 1024
    # Two agents must never share a port: half of the scrapes would go to the wrong one.
    allow_reuse_port = False

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[Any, ...],
        answer: Callable[[Handler], Answer],
        any_name: bool,
    ) -> None:
        self.address_family = family
        self.answer, self.any_name = answer, any_name
        self.answering: WeakSet[threading.Thread] = WeakSet()
        # The oldest first.
        self._clients: dict[Any, None] = {}
        super().__init__(address, Handler)

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
            # An answer takes milliseconds: the oldest is one that sends or reads slowly. Its thread
            # closes it; its place is free at once.
            oldest = next(iter(self._clients))
            self._clients.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        self._clients[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started, and `/healthz` has to say so: one client after the other.
            self.process_request_thread(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.answering.add(threading.current_thread())
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not logged: clients may disconnect at any time."""


class Handler(BaseHTTPRequestHandler):
    """The guard looks at a request, and one answer is sent."""

    server: BoundedServer
    server_version = "otel-ddp"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_S
    given: Mapping[str, str] = {}
    """The headers of its answer, which may replace those of the guard."""

    def page_answer(self, app: App, *, is_known: bool = False) -> Answer:
        """The page's answer. *is_known*: who asks has shown that they may see everything."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        is_private = functools.cache(lambda: is_known or self._is_own_connection())
        # A browser sends remembered Basic credentials by itself, a Bearer token never.
        has_token = is_known and headers.get("authorization", "").lower().startswith("bearer ")
        more = {"method": self.command, "headers": headers, "is_private": is_private}
        return app.answer(Question.of_address(self.path, has_token=has_token, **more))

    def _is_own_connection(self) -> bool:
        """Whether our own user or root has opened this connection on this node."""
        try:
            peer, own = self.connection.getpeername(), self.connection.getsockname()
        except OSError:
            return False
        return is_own(peer[:2], own[:2])

    def do_GET(self) -> None:
        try:
            http.check_request(self.path, self.headers, any_name=self.server.any_name)
            given = self.server.answer(self)
        except Refused as why:
            given = as_text(why.status, f"{why}\n")
        self.send_response(given.status)
        self.given = given.headers
        self.send_header("Content-Length", str(len(given.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(given.body)

    do_HEAD = do_POST = do_GET

    def end_headers(self) -> None:
        # The library's own answers to what is no request at all end here as well.
        for name, value in {**http.HEADERS, **self.given}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def bind(
    host: str, port: int, answer: Callable[[Handler], Answer], *, any_name: bool = False
) -> BoundedServer:
    """A server on this port, or on the next one that is free; on any port for 0.

    *answer*: answers the requests that the guard lets through. *any_name*: as in the guard.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in range(port, min(port + _PORTS_TO_TRY, 65536)) if port else ():
        try:
            return BoundedServer(family, (host, attempt), answer, any_name)
        except OSError as error:  # noqa: PERF203
            # Another error, such as an address of another machine, is the same for every port.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # Any free port.
    return BoundedServer(family, (host, 0), answer, any_name)
