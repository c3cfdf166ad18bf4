"""A bounded HTTP server with access control: a token, or the user of a local connection."""

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
"""One end of a connection: its address and its port."""


class NoToken(Exception):
    """The endpoint needs a token, but none is set; the text says how to set one."""


def find_token(setting: str, host: str) -> bytes:
    """The token that requests need if the server listens on *host*; empty if they need none.

    Raises NoToken if they need one, but none is set.
    """
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
    """Whether this `Authorization` header contains the token; True if no token is needed."""
    kind, _, given = authorization.partition(" ")
    return not token or hmac.compare_digest(_given_token(kind.lower(), given), token)


def _given_token(kind: str, given: str) -> bytes:
    if kind == "bearer":
        return given.strip().encode()
    # Accept Basic authentication too, for browsers, which prompt for a name and a password. The
    # password is the token.
    if kind == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    return b""


# -- the user of a local connection


def is_own(peer: tuple[str, int], own: tuple[str, int], proc: Path = _PROC) -> bool:
    """Whether our user or root owns the other end of a connection; False if unknown.

    *peer*, *own*: address and port of the other end and of our end.
    """
    theirs = _plain(ip_address(peer[0].partition("%")[0])), peer[1]
    ours = _plain(ip_address(own[0].partition("%")[0])), own[1]
    if not theirs[0].is_loopback:
        return False
    owners = (user for ends, user in _connections(proc, own[1]) if ends == (theirs, ours))
    return next(owners, None) in (_ROOT, os.geteuid())


def _connections(proc: Path, port: int) -> Iterator[tuple[tuple[End, End], int]]:
    """The connections with this port: both ends, and the user who owns the first end."""
    # Only rows with this text are parsed: parsing a row takes 20 times as long as searching it.
    wanted = b":%04X " % port
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(proc / name, "rb", buffering=_PIECE) as file:
            for fields in (line.decode().split() for line in file if wanted in line):
                # Skip sockets with inode 0: they were closed, and the kernel shows root as their
                # owner, whoever it was.
                if fields[3] == _ESTABLISHED and fields[9] != "0":
                    yield (_end(fields[1]), _end(fields[2])), int(fields[7])


def _end(text: str) -> End:
    """Parse an address and a port as /proc/net/tcp writes them."""
    address, _, port = text.partition(":")
    # The address is written as words of four bytes, each in the machine's byte order.
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    found = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return _plain(found), int(port, 16)


def _plain(found: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The address; an IPv4 address if it is an IPv4-mapped IPv6 address."""
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found


_PORTS_TO_TRY = 64
CLIENT_TIMEOUT_S = 5.0
_MOST_CLIENTS = 64


class BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    # The backlog of connections. It is large, because a client that finds it full waits at least a
    # second before it tries again.
    request_queue_size = 1024
    # Don't share the port: of two agents on one port, each would get half of the scrapes.
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
        # The open connections, oldest first.
        self._clients: dict[Any, None] = {}
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        # Don't call HTTPServer.server_bind, which looks up this host's full name: this takes
        # minutes if the name server does not answer.
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # Pause before the next attempt: while no file descriptor is free, accepting fails at
            # once, so the loop would be busy.
            time.sleep(0.05)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._clients) >= _MOST_CLIENTS:
            # There are too many clients. Disconnect the oldest: an answer takes milliseconds, so
            # this client must be slow.
            oldest = next(iter(self._clients))
            self._clients.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        self._clients[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.answering.add(threading.current_thread())
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: errors are normal, since clients may disconnect at any time."""


class Handler(BaseHTTPRequestHandler):
    """Checks one request, sends its answer, and closes the connection."""

    server: BoundedServer
    server_version = "otel-ddp"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_S
    given: Mapping[str, str] = {}
    """The headers of the current answer; they replace default headers of the same name."""

    def page_answer(self, app: App, *, is_known: bool = False) -> Answer:
        """The page's answer to this request. *is_known*: whether the request had the token."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        is_private = functools.cache(lambda: is_known or self._is_own_connection())
        # Only a Bearer token shows that no other web site has made the request: browsers add
        # remembered Basic credentials to requests of any site, but never a Bearer token.
        has_token = is_known and headers.get("authorization", "").lower().startswith("bearer ")
        more = {"method": self.command, "headers": headers, "is_private": is_private}
        return app.answer(Question.of_address(self.path, has_token=has_token, **more))

    def _is_own_connection(self) -> bool:
        """Whether our user or root opened this connection on this node."""
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
        # Add our headers here, so that the library's answers to malformed requests get them too.
        for name, value in {**http.HEADERS, **self.given}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def bind(
    host: str, port: int, answer: Callable[[Handler], Answer], *, any_name: bool = False
) -> BoundedServer:
    """A server on this port or on the next free port. For port 0, on any free port.

    *answer*: answers requests that pass the checks. *any_name*: accept any Host header.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in range(port, min(port + _PORTS_TO_TRY, 65536)) if port else ():
        try:
            return BoundedServer(family, (host, attempt), answer, any_name)
        except OSError as error:  # noqa: PERF203
            # Don't try other ports after other errors, e.g. if the address is of another machine.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # All these ports are in use, or the port is 0: use any free port.
    return BoundedServer(family, (host, 0), answer, any_name)
