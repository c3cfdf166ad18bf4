"""Sends OTLP over HTTP: one POST of prepared bytes, and what its answer means."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import math
import socket
import ssl
import time
from collections.abc import Iterator

import requests
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from otel_ddp import __version__
from otel_ddp.agent.export.otlp.encode import ABOUT_THE_WAY, accepted_with, answered
from otel_ddp.agent.export.otlp.variables import (
    Variables,
    is_loopback,
    one_line,
    without_credentials,
)
from otel_ddp.agent.queue.delivery import Outcome

# A reply of a collector is a few bytes; a longer one comes from another program.
_REPLY_LIMIT_BYTES = 16 * 1024

# Errors whose text could repeat a header, and with it a token.
_HEADER = (requests.exceptions.InvalidHeader, UnicodeError)
# RequestException is an OSError. Other errors come from a certificate that cannot be loaded, or
# from an address that cannot be written.
UNANSWERED = (OSError, ValueError, http.client.HTTPException)
_NO_ADDRESS = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)


class HttpSender:
    """Sends the requests of one signal over HTTP.

    The timeout is for each wait on the socket: headers that drip hold up this signal, and no other.
    """

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
        tls = there.tls_files()
        self._session = requests.Session()
        self._session.headers.clear()
        # Without one, requests would look for a password in ~/.netrc, and replace our token.
        self._session.auth = as_it_is
        self._session.verify = tls.certificate or True
        self._session.cert = (
            (tls.client_certificate, tls.client_key) if tls.client_key else tls.client_certificate
        ) or None
        # Otherwise a cluster's HTTP_PROXY would be asked, and would reach its own loopback.
        self._session.trust_env = not is_loopback(self._url)

    def send(self, body: bytes) -> Outcome:
        ends_at = time.monotonic() + self._timeout_s
        try:
            with self._session.post(
                self._url,
                data=gzip.compress(body, 6) if self._compression == "gzip" else body,
                headers=self._headers,
                timeout=self._timeout_s,
                allow_redirects=False,
                stream=True,
            ) as response:
                return self._outcome_of(response, ends_at)
        except _HEADER:
            return Outcome("retry", "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent")
        except UNANSWERED as error:
            where = without_credentials(self._url)
            return Outcome("retry", explain(error, where, self._timeout_s))

    def close(self) -> None:
        self._session.close()

    def _outcome_of(self, response: requests.Response, ends_at: float) -> Outcome:
        status = response.status_code
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


def as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """An authentication that adds nothing."""
    return request


def _reply(response: requests.Response, ends_at: float) -> bytes:
    reply = b""
    try:
        # Byte by byte: a reply has a few, and a longer piece would be waited for as a whole.
        for piece in response.iter_content(1):
            reply += piece
            if len(reply) > _REPLY_LIMIT_BYTES or time.monotonic() > ends_at:
                break
    except requests.RequestException:
        # The status is known, and it counts more than what the reply would add.
        return b""
    return reply if len(reply) <= _REPLY_LIMIT_BYTES else b""


def _detail(response: requests.Response, reply: bytes) -> str:
    """The reason that the collector gives: in a google.rpc.Status, or as plain text."""
    kind = response.headers.get("Content-Type", "")
    if "protobuf" in kind:
        try:
            return one_line(Status.FromString(reply).message)
        except DecodeError:
            return ""
    return one_line(reply.decode("utf-8", "replace")) if kind.startswith("text/plain") else ""


def _is_tls_port(response: requests.Response, reply: bytes) -> bool:
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
    if isinstance(error, _NO_ADDRESS):
        return f"{where} is no address to send to; http://host:4318 would be one"
    found = list(_causes(error))
    for cause in found:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS to {where} failed: certificate verify failed: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS to {where} failed: {cause.reason or 'no handshake'}"
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused by {where}"
        if isinstance(cause, socket.gaierror):
            return f"the host name of {where} does not resolve"
    if isinstance(error, requests.exceptions.ProxyError):
        return f"the proxy on the way to {where} failed"
    if any(isinstance(cause, (requests.Timeout, TimeoutError)) for cause in found):
        return f"no answer from {where} within {timeout_s:g} s"
    if any(isinstance(cause, ConnectionError) for cause in found):
        return f"connection closed by {where}"
    strerror = next((e.strerror for e in found if isinstance(e, OSError) and e.strerror), "")
    said = strerror or (str(error) if type(error) is OSError else "")
    return f"no way to {where}: {one_line(said) or type(error).__name__}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it: requests and urllib3 wrap what the system says."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
