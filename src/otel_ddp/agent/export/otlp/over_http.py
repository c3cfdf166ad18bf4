"""Sends OTLP over HTTP: one POST of prepared bytes, and what its answer means."""

from __future__ import annotations

import contextlib
import gzip
import math
import select
import socket
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from otel_ddp import __version__
from otel_ddp.agent.export.otlp.encode import ABOUT_THE_WAY, accepted_with, answered
from otel_ddp.agent.export.otlp.variables import (
    TlsFiles,
    Variables,
    is_loopback,
    one_line,
    take_user,
    without_credentials,
)
from otel_ddp.agent.queue.delivery import Outcome

# A reply of a collector is a few bytes; a longer one comes from another program.
_REPLY_LIMIT_BYTES = 16 * 1024

UNANSWERED = (OSError, HTTPException)
_PORTS = {"http": 80, "https": 443}
_NO_FILES = TlsFiles()
# Characters of a URL that are not percent-encoded; % stays, so nothing is encoded twice.
_SAFE = "!#$%&'()*+,/:;=?@[]~"


class Route:
    """A kept connection to an address, by a proxy if the variables name one for it.

    The timeout is for each wait on the socket.
    """

    def __init__(self, url: str, timeout_s: float, tls: TlsFiles = _NO_FILES) -> None:
        """Raises one of UNANSWERED if the URL is invalid or a TLS file cannot be loaded."""
        there, self._headers = _address(url), dict[str, str]()
        host, port = str(there.hostname), there.port or _PORTS[there.scheme]
        proxy = _proxy(there)
        by = (host, port) if proxy is None else (str(proxy.hostname), proxy.port or _PORTS["http"])
        target = there._replace(path=there.path or "/", fragment="")
        if proxy is None or there.scheme == "https":
            target = target._replace(scheme="", netloc="")
        self._target = quote(target.geturl(), _SAFE)
        if there.scheme == "https":
            context = ssl.create_default_context(cafile=tls.certificate or None)
            if tls.client_certificate:
                # A password is never asked for.
                context.load_cert_chain(tls.client_certificate, tls.client_key or None, "")
            self._connection: HTTPConnection = HTTPSConnection(
                *by, timeout=timeout_s, context=context
            )
        else:
            self._connection = HTTPConnection(*by, timeout=timeout_s)
        if proxy is not None:
            _, authorization = take_user(proxy.geturl())
            headers = {"Proxy-Authorization": authorization} if authorization else {}
            if there.scheme == "https":
                self._connection.set_tunnel(host, port, headers)
            else:
                self._headers = headers

    def post(self, body: bytes, headers: Mapping[str, str]) -> HTTPResponse:
        """Raises an error of UNANSWERED, or ValueError for a header that cannot be sent."""
        connection = self._connection
        if connection.sock is not None:
            # Readable without a request: the other side has closed it meanwhile.
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if poll.poll(0):
                connection.close()
        try:
            connection.request("POST", self._target, body, {**headers, **self._headers})
        except (BrokenPipeError, ConnectionResetError):
            # A server that takes no more of it may have answered.
            if connection.sock is None:
                raise
        return connection.getresponse()

    def close(self) -> None:
        self._connection.close()


def _address(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            # As each look-up of a name begins.
            parts.hostname.encode("idna")
            return parts
    except ValueError:
        pass
    raise InvalidURL(url)


def _proxy(there: SplitResult) -> SplitResult | None:
    """The one that the variables name for this address, if they do."""
    host, named = str(there.hostname), getproxies()
    url = named.get(there.scheme) or named.get("all")
    # A cluster's proxy would reach its own loopback.
    if not url or is_loopback(there.geturl()) or proxy_bypass(f"{host}:{there.port or ''}"):
        return None
    for each in named.get("no", "").split(","):
        with contextlib.suppress(ValueError):
            if ip_address(host) in ip_network(each.strip(), strict=False):
                return None
    with contextlib.suppress(InvalidURL):
        found = _address(url if "://" in url else f"http://{url}")
        if found.scheme == "http":
            return found
    raise OSError("a proxy has to be of http://")


class HttpSender:
    """Sends the requests of one signal over HTTP: headers that drip hold up no other."""

    def __init__(self, there: Variables) -> None:
        self._signal, self._url = there.signal, there.url
        self._timeout_s, self._compression = there.timeout_s(), there.compression()
        self._headers = {
            **there.headers(),
            "content-type": "application/x-protobuf",
            "user-agent": f"otel_ddp/{__version__}",
        }
        if self._compression != "none":
            self._headers["content-encoding"] = self._compression
        self._tls = there.tls_files()
        self._route: Route | None = None

    def send(self, body: bytes) -> Outcome:
        ends_at = time.monotonic() + self._timeout_s
        packed = gzip.compress(body, 6) if self._compression == "gzip" else body
        try:
            self._route = self._route or Route(self._url, self._timeout_s, self._tls)
            with self._route.post(packed, self._headers) as response:
                outcome = self._outcome_of(response, ends_at)
                if not response.isclosed():
                    # The rest of it is not waited for.
                    self.close()
                return outcome
        except UNANSWERED as error:
            where = without_credentials(self._url)
            return Outcome("retry", explain(error, where, self._timeout_s))
        except ValueError:
            # Its text could repeat a header, and with it a token.
            return Outcome("retry", "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent")

    def close(self) -> None:
        if self._route is not None:
            self._route.close()

    def _outcome_of(self, response: HTTPResponse, ends_at: float) -> Outcome:
        status = response.status
        where = without_credentials(self._url, with_path=True)
        about_the_way = 300 <= status < 400 or status in ABOUT_THE_WAY
        reply = b"" if about_the_way else _reply(response, ends_at)
        if 200 <= status < 300:
            return accepted_with(reply, where)
        why = f"{status} from {where}"
        if status == 400 and _is_tls_port(response, reply):
            # Kept: the server has not read the request, and the address can be corrected.
            return Outcome("retry", f"{why}: it wants https:// (OTEL_EXPORTER_OTLP_ENDPOINT)")
        after_s = _retry_after_s(response.headers.get("Retry-After"))
        return answered(status, why, _detail(response, reply), self._signal, after_s)


def _reply(response: HTTPResponse, ends_at: float) -> bytes:
    reply = b""
    try:
        # In the pieces in which it comes.
        while piece := response.read1(_REPLY_LIMIT_BYTES):
            reply += piece
            if len(reply) >= _REPLY_LIMIT_BYTES or time.monotonic() > ends_at:
                return reply
    except UNANSWERED:
        # The status is known, and it counts more than what the reply would add.
        return b""
    # All of it.
    response.close()
    return reply


def _detail(response: HTTPResponse, reply: bytes) -> str:
    """The reason that the collector gives: in a google.rpc.Status, or as plain text."""
    kind = response.headers.get("Content-Type", "")
    if "protobuf" in kind:
        try:
            return one_line(Status.FromString(reply).message)
        except DecodeError:
            return ""
    return one_line(reply.decode("utf-8", "replace")) if kind.startswith("text/plain") else ""


def _is_tls_port(response: HTTPResponse, reply: bytes) -> bool:
    """Whether a TLS port answers 400 to http://, which is not about the request."""
    # Servers in Go, such as the collector, answer without a single header. Their sentence is often
    # lost, because they close while we still write. nginx and Apache write these words.
    return not response.headers or b"plain http" in reply.lower()


def _retry_after_s(text: str | None) -> float:
    """The header's seconds; 0 for any other text, such as a date."""
    with contextlib.suppress(TypeError, ValueError):
        seconds = float(text or "")
        return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
    return 0.0


def explain(error: BaseException, where: str, timeout_s: float) -> str:
    """Why a request was not answered, for people; of its address only *where*."""
    if isinstance(error, InvalidURL):
        return f"{where} is no address to send to; http://host:4318 would be one"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS to {where} failed: certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS to {where} failed: {error.reason or 'no handshake'}"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused by {where}"
    if isinstance(error, socket.gaierror):
        return f"the host name of {where} does not resolve"
    if isinstance(error, TimeoutError):
        return f"no answer from {where} within {timeout_s:g} s"
    if isinstance(error, ConnectionError):
        return f"connection closed by {where}"
    said = getattr(error, "strerror", None) or (str(error) if type(error) is OSError else "")
    return f"no way to {where}: {one_line(said) or type(error).__name__}"
