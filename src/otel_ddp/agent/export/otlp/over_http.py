"""Sends OTLP over HTTP: the official exporters with a session that sends our own bytes."""

from __future__ import annotations

import gzip
import http.client
import math
import os
import time
import zlib
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import entry_points
from typing import Any

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

from otel_ddp.agent.export.otlp import deadline
from otel_ddp.agent.export.otlp.addresses import is_loopback, take_user, without_credentials
from otel_ddp.agent.export.otlp.http_errors import causes, explain
from otel_ddp.agent.export.otlp.outcome import (
    Outcome,
    Signal,
    accepted,
    one_line,
)

# A reply of a collector is a few bytes; a longer one comes from another program.
_REPLY_LIMIT_BYTES = 64 * 1024

# What these say is about the bytes of this request. Everything else can be mended elsewhere.
_ABOUT_THE_REQUEST = frozenset({400, 413, 422})
# What these say is about the way, whatever is sent: addresses, tokens, proxies, servers too busy.
_ABOUT_THE_WAY = frozenset(
    {401, 402, 403, 404, 405, 407, 408, 410, 415, 421, 425, 426, 429, 451, 502, 503, 504, 511}
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


# All that a collector gets that was found, not named: any program may be one.
_HARMLESS_HEADERS = frozenset({"content-type", "content-encoding", "user-agent"})


class AttemptEnded(requests.RequestException):
    """Ends an attempt for the exporter, which would try again: the delivery does that."""


class PreparedSession(requests.Session):
    """The session of one exporter: sends our bytes instead of the exporter's empty request.

    `underlying` sends them, which may be the session of a credential provider. An attempt ends
    with its timeout, whatever the answer. Two things are not bounded so: the look-up of a name,
    and a name with several silent addresses, each of which gets the whole timeout.
    """

    def __init__(
        self,
        signal: Signal,
        underlying: requests.Session,
        timeout_s: float,
        *,
        named: bool = True,
        authorization: str = "",
    ) -> None:
        """*named*: whether people configured this collector. *authorization*: of the address."""
        super().__init__()
        # Only the exporter's headers count here; the underlying session adds its own defaults.
        self.headers.clear()
        self.underlying = underlying
        deadline.enforce(underlying)
        self.body = b""
        self.outcome: Outcome | None = None
        self._signal = signal
        self._timeout_s = timeout_s
        self._named = named
        self._authorization = authorization

    def request(  # type: ignore[override]
        self, method: str, url: str, *args: Any, **kwargs: Any
    ) -> requests.Response:
        """Called by the exporters of all versions, in the end."""
        headers = CaseInsensitiveDict({**self.headers, **(kwargs.get("headers") or {})})
        if not self._named:
            for name in [name for name in headers if name.lower() not in _HARMLESS_HEADERS]:
                del headers[name]
        elif self._authorization:
            headers.setdefault("Authorization", self._authorization)
        body = _compressed(self.body, str(headers.get("Content-Encoding", "")))
        ends_at = time.monotonic() + kwargs["timeout"]
        verify, cert = kwargs.get("verify"), kwargs.get("cert")
        call = {
            "headers": headers,
            "data": body,
            "verify": self.verify if verify is None else verify,
            "cert": self.cert if cert is None else cert,
            "allow_redirects": False,
            "stream": True,
            # Without one, requests would look for a password in ~/.netrc, and replace our token.
            "auth": self.underlying.auth or _as_it_is,
        }
        before = deadline.DEADLINE.set(ends_at)
        try:
            response = self._post(method, url, call, ends_at)
            with response:
                self.outcome = self._outcome_of(response, url, ends_at)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # RequestException is an OSError. Other errors come from a certificate that cannot be
            # loaded, or from a header that cannot be written.
            self.outcome = Outcome("retry", explain(error, url, self._timeout_s))
            raise AttemptEnded(self.outcome.why) from None
        finally:
            deadline.DEADLINE.reset(before)
        if self.outcome.kind != "delivered":
            raise AttemptEnded(self.outcome.why)
        return response

    def close(self) -> None:
        super().close()
        self.underlying.close()

    def _post(
        self, method: str, url: str, call: dict[str, Any], ends_at: float
    ) -> requests.Response:
        left_s = ends_at - time.monotonic()
        try:
            return self.underlying.request(method, url, timeout=left_s, **call)
        except requests.ConnectionError as error:
            # The collector may close a connection that was kept open just when we use it. That
            # tells nothing about the collector, so the request is sent once more at once.
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or not any(isinstance(e, ConnectionResetError) for e in causes(error)):
                raise
        return self.underlying.request(method, url, timeout=left_s, **call)

    def _outcome_of(self, response: requests.Response, url: str, ends_at: float) -> Outcome:
        status = response.status_code
        where = without_credentials(url, with_path=True)
        if 200 <= status < 300:
            return self._accepted(_reply(response, ends_at), where)
        why = f"{status} from {where}"
        if status not in _ABOUT_THE_REQUEST:
            doubtful = status >= 400 and status not in _ABOUT_THE_WAY
            after_s = _retry_after_s(response.headers.get("Retry-After"))
            if doubtful:
                detail = _detail(response, _reply(response, ends_at))
                why += f": {detail}" if detail else ""
            why += self._advice(status)
            return Outcome("retry", why, retry_after_s=after_s, doubtful=doubtful)
        reply = _reply(response, ends_at)
        if status == 400 and _is_tls_port(response, reply):
            # Kept: the server has not read the request, and the address can be corrected.
            return Outcome("retry", f"{why}: it wants https:// (OTEL_EXPORTER_OTLP_ENDPOINT)")
        detail = _detail(response, reply)
        why = f"{why}: {detail}" if detail else why
        return Outcome("refused", why, too_large=status == 413)

    def _advice(self, status: int) -> str:
        """What people can mend, where the status says it."""
        if status in (401, 403):
            return ": token rejected (OTEL_EXPORTER_OTLP_HEADERS)"
        if 300 <= status < 400:
            return ": a redirect, which OTLP does not follow (OTEL_EXPORTER_OTLP_ENDPOINT)"
        return f": {self._signal} are not taken there" if status == 404 else ""

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


class HttpSender:
    """Sends the requests of one signal over HTTP."""

    def __init__(
        self, signal: Signal, url: str, timeout_s: float, compression: str, named: bool = True
    ) -> None:
        """*named*: whether people configured this collector; else it gets no configured header."""
        underlying = (_provided_session(signal) if named else None) or requests.Session()
        url, authorization = take_user(url)
        if is_loopback(url):
            # Otherwise a cluster's HTTP_PROXY would be asked, and would reach its own loopback.
            underlying.trust_env = False
        self._session = PreparedSession(
            *(signal, underlying, timeout_s), named=named, authorization=authorization
        )
        self._nothing: object = MetricsData(resource_metrics=[]) if signal == "metrics" else []
        self._exporter = _EXPORTER[signal](
            endpoint=url,
            timeout=timeout_s,
            compression=Compression(compression),
            session=self._session,
        )

    def send(self, body: bytes) -> Outcome:
        session = self._session
        session.body, session.outcome = body, None
        self._exporter.export(self._nothing)
        session.body = b""
        return session.outcome or Outcome("retry", "the exporter sent nothing")

    def close(self) -> None:
        self._exporter.shutdown()


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """An authentication that adds nothing."""
    return request


def _compressed(body: bytes, encoding: str) -> bytes:
    encoding = encoding.strip().lower()
    if encoding == "gzip":
        return gzip.compress(body, 6)
    return zlib.compress(body) if encoding == "deflate" else body


def _reply(response: requests.Response, ends_at: float) -> bytes:
    reply = b""
    try:
        for piece in response.iter_content(4096):
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


def _retry_after_s(text: str | None) -> float | None:
    """The header's seconds or date; None for any other text."""
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
    """The session of a credential provider; exporters ask for it only if they are given none."""
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
