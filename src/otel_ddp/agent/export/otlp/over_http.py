"""OTLP over HTTP: the official exporters with a session that carries what we encoded."""

from __future__ import annotations

import gzip
import http.client
import math
import os
import socket
import ssl
import time
import zlib
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import entry_points
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import MetricsData
from requests.structures import CaseInsensitiveDict

from otel_ddp.agent.export.otlp import punctual
from otel_ddp.agent.export.otlp.outcome import Outcome, Signal, accepted, said, shown

# A reply is a few bytes. Whoever sends more is not a collector, or not a friendly one.
REPLY_LIMIT = 64 * 1024

_WORTH_RETRYING = frozenset({429, 502, 503, 504})

# Every message whose text could repeat a header, and with it a token.
_OUR_CONFIGURATION = (requests.exceptions.InvalidHeader, UnicodeError)
_NO_ADDRESS = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)

_EXPORTER: dict[Signal, Any] = {
    "metrics": OTLPMetricExporter,
    "traces": OTLPSpanExporter,
    "logs": OTLPLogExporter,
}
_RESPONSE: dict[Signal, Any] = {
    "metrics": ExportMetricsServiceResponse,
    "traces": ExportTraceServiceResponse,
    "logs": ExportLogsServiceResponse,
}


class Settled(requests.RequestException):
    """Ends an attempt for the exporter, so that it does not try again: that is our work."""


class Courier(requests.Session):
    """The session of one exporter: sends our bytes instead of the exporter's empty ones.

    `wire` does the sending, so that a credential provider's session can stand there. However it
    is answered, an attempt ends with its timeout (looking up a name aside, which nothing bounds,
    and a name with several silent addresses, each of which is given it).
    """

    def __init__(self, signal: Signal, wire: requests.Session, timeout_s: float) -> None:
        super().__init__()
        # Only what the exporter puts here shall count; the wire brings its own defaults.
        self.headers.clear()
        self.wire = wire
        punctual.make(wire)
        self.body = b""
        self.outcome: Outcome | None = None
        self._signal = signal
        self._timeout_s = timeout_s

    def request(  # type: ignore[override]
        self, method: str, url: str, *args: Any, **kwargs: Any
    ) -> requests.Response:
        """What every exporter ends up calling, whichever way its version goes."""
        headers = CaseInsensitiveDict({**self.headers, **(kwargs.get("headers") or {})})
        body = _compressed(self.body, str(headers.get("Content-Encoding", "")))
        deadline = time.monotonic() + kwargs["timeout"]
        verify, cert = kwargs.get("verify"), kwargs.get("cert")
        call = {
            "headers": headers,
            "data": body,
            "verify": self.verify if verify is None else verify,
            "cert": self.cert if cert is None else cert,
            "allow_redirects": False,
            "stream": True,
        }
        before = punctual.DEADLINE.set(deadline)
        try:
            response = self._post(method, url, call, deadline)
            with response:
                self.outcome = self._judge(response, url, deadline)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # RequestException is an OSError; what is no RequestException comes from a
            # certificate that cannot be loaded or a header that cannot be written.
            self.outcome = Outcome("retry", explain(error, url, self._timeout_s))
            raise Settled(self.outcome.why) from None
        finally:
            punctual.DEADLINE.reset(before)
        if self.outcome.kind != "delivered":
            raise Settled(self.outcome.why)
        return response

    def close(self) -> None:
        super().close()
        self.wire.close()

    def _post(
        self, method: str, url: str, call: dict[str, Any], deadline: float
    ) -> requests.Response:
        first_try = time.monotonic()
        try:
            return self.wire.request(method, url, timeout=deadline - first_try, **call)
        except requests.ConnectionError as error:
            # A connection that was kept open may be closed by the collector in the moment in
            # which we use it. That says nothing about the collector: once more, at once.
            left = deadline - time.monotonic()
            if left <= 0 or not any(isinstance(e, ConnectionResetError) for e in _chain(error)):
                raise
        return self.wire.request(method, url, timeout=left, **call)

    def _judge(self, response: requests.Response, url: str, deadline: float) -> Outcome:
        status = response.status_code
        where = shown(url, path=True)
        if 200 <= status < 300:
            return self._accepted(_reply(response, deadline), where)
        why = f"{status} from {where}"
        if status in _WORTH_RETRYING:
            after = _retry_after_s(response.headers.get("Retry-After"))
            return Outcome("retry", why, retry_after_s=after)
        if status in (401, 403):
            # Kept: a token can be mended or turned over while the data waits.
            return Outcome("retry", f"{why}: token rejected (OTEL_EXPORTER_OTLP_HEADERS)")
        if 300 <= status < 400:
            return Outcome("refused", f"{why}: a redirect, which OTLP does not follow")
        if status == 404:
            return Outcome("refused", f"{why}: {self._signal} are not taken there")
        reply = _reply(response, deadline)
        if status == 400 and _is_tls_port(response, reply):
            # Kept: nobody has looked at what was sent, and the address can be mended.
            return Outcome("retry", f"{why}: it wants https:// (OTEL_EXPORTER_OTLP_ENDPOINT)")
        detail = _detail(response, reply)
        return Outcome("refused", f"{why}: {detail}" if detail else why)

    def _accepted(self, reply: bytes, where: str) -> Outcome:
        try:
            partial = _RESPONSE[self._signal].FromString(reply).partial_success
        except DecodeError:
            # Some backends answer with text; the status is what counts.
            return accepted(where, 0, "")
        rejected = getattr(partial, _REJECTED[self._signal])
        return accepted(where, rejected, partial.error_message)


_REJECTED: dict[Signal, str] = {
    "metrics": "rejected_data_points",
    "traces": "rejected_spans",
    "logs": "rejected_log_records",
}


class HttpLine:
    """One signal's way to the collector."""

    def __init__(self, signal: Signal, url: str, timeout_s: float, compression: str) -> None:
        wire = _provided_session(signal) or requests.Session()
        if is_loopback(url):
            # A cluster's HTTP_PROXY would be asked for its own loopback.
            wire.trust_env = False
        self._courier = Courier(signal, wire, timeout_s)
        self._nothing: object = MetricsData(resource_metrics=[]) if signal == "metrics" else []
        self._exporter = _EXPORTER[signal](
            endpoint=url,
            timeout=timeout_s,
            compression=Compression(compression),
            session=self._courier,
        )

    def send(self, body: bytes) -> Outcome:
        courier = self._courier
        courier.body, courier.outcome = body, None
        self._exporter.export(self._nothing)
        courier.body = b""
        return courier.outcome or Outcome("retry", "the exporter sent nothing")

    def close(self) -> None:
        self._exporter.shutdown()


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def explain(error: BaseException, url: str, timeout_s: float) -> str:
    """One line about why nothing came through; never the text of a header."""
    where = shown(url)
    chain = list(_chain(error))
    if isinstance(error, _OUR_CONFIGURATION):
        return "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent"
    if isinstance(error, _NO_ADDRESS):
        return f"{where} is no address of a collector; http://host:4318 would be one"
    for cause in chain:
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
    if any(isinstance(cause, (requests.Timeout, TimeoutError)) for cause in chain):
        return f"no answer from {where} within {timeout_s:g} s"
    if any(isinstance(cause, ConnectionError) for cause in chain):
        return f"connection closed by {where}"
    for cause in chain:
        if isinstance(cause, OSError) and cause.strerror:
            return f"no way to {where}: {said(cause.strerror)}"
    if type(error) is OSError:
        return f"no way to {where}: {said(str(error))}"
    return f"no way to {where}: {type(error).__name__}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it wraps: requests and urllib3 each hide the cause their own way."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        this = waiting.pop(0)
        if not isinstance(this, BaseException) or id(this) in seen:
            continue
        seen.add(id(this))
        yield this
        waiting += [*this.args, getattr(this, "reason", None), this.__cause__, this.__context__]


def _compressed(body: bytes, encoding: str) -> bytes:
    encoding = encoding.strip().lower()
    if encoding == "gzip":
        return gzip.compress(body, 6)
    return zlib.compress(body) if encoding == "deflate" else body


def _reply(response: requests.Response, deadline: float) -> bytes:
    reply = b""
    try:
        for piece in response.iter_content(4096):
            reply += piece
            if len(reply) > REPLY_LIMIT or time.monotonic() > deadline:
                break
    except requests.RequestException:
        # The status is known; what the reply would have added is not worth the request.
        return b""
    return reply if len(reply) <= REPLY_LIMIT else b""


def _detail(response: requests.Response, reply: bytes) -> str:
    """What the collector says is wrong: a google.rpc.Status, or plain text."""
    kind = response.headers.get("Content-Type", "")
    if "protobuf" in kind:
        try:
            return said(Status.FromString(reply).message)
        except DecodeError:
            return ""
    return said(reply.decode("utf-8", "replace")) if kind.startswith("text/plain") else ""


def _is_tls_port(response: requests.Response, reply: bytes) -> bool:
    """Whether this 400 is what a TLS port says to http://, and not to what was sent."""
    # Servers in Go, as the collector is, answer without a single header. Their sentence is often
    # lost, because they close while we still write. nginx and Apache have one, with these words.
    return not response.headers or b"plain http" in reply.lower()


def _retry_after_s(text: str | None) -> float | None:
    """Seconds or a date; anything else is no wish that could be granted."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _provided_session(
    signal: Signal, env: Mapping[str, str] | None = None
) -> requests.Session | None:
    """The session of a credential provider, which an exporter asks for only if it gets none."""
    env = os.environ if env is None else env
    name = env.get("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER") or env.get(
        f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal.upper()}_CREDENTIAL_PROVIDER"
    )
    if not name:
        return None
    for entry in entry_points(group="opentelemetry_otlp_credential_provider", name=name):
        session = entry.load()()
        if isinstance(session, requests.Session):
            return session
        raise RuntimeError(f"credential provider {name!r} must return a requests.Session")
    raise RuntimeError(f"credential provider {name!r} is not installed")
