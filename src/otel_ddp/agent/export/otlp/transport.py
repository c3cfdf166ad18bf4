"""Sends encoded OTLP requests as configured by the OTEL_* variables, over HTTP or gRPC."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from otel_ddp import __version__, errors
from otel_ddp.agent.export.delivery import Outcome
from otel_ddp.agent.export.otlp.encode import ABOUT_THE_ROUTE, accepted_with, answered
from otel_ddp.agent.export.otlp.variables import Variables, signals_with_endpoint
from otel_ddp.agent.export.post import UNANSWERED, Route, explain, one_line, without_credentials
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.export.otlp.over_grpc import GrpcSender

# How much of a reply is read. A collector replies with a few bytes; only other programs send more.
_REPLY_LIMIT_BYTES = 16 * 1024
# Exceptions that mean that a variable, a file or a package is unusable.
_UNUSABLE = (ValueError, OSError, RuntimeError, ImportError, LookupError, TypeError)


class Transport:
    """Sends each signal with the protocol and to the address that its variables set.

    Raises nothing: each failure is an Outcome. Each signal must be sent by one thread at a time.
    """

    def __init__(
        self,
        settings: Settings,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._env = os.environ if env is None else env
        self._senders: dict[str, HttpSender | GrpcSender] = {}
        silence_libraries()

    @property
    def destination(self) -> str:
        """The address of the first exported signal, without credentials."""
        (first, *_) = signals_with_endpoint(self._settings, self._env)
        return without_credentials(self._variables(first).url)

    def _variables(self, signal: str) -> Variables:
        return Variables(signal, self._settings, self._env)

    def send(self, signal: str, body: bytes) -> Outcome:
        """Try once to send a body. The timeout applies separately to connecting, sending and each
        read."""
        try:
            if signal not in self._senders:
                self._senders[signal] = self._open(self._variables(signal))
            outcome = self._senders[signal].send(body)
        except _UNUSABLE as error:
            outcome = Outcome("retry", f"{signal} cannot be sent: {one_line(str(error))}")
        if outcome.kind == "retry" and signal in self._senders:
            # Close the sender, so that the next attempt reloads certificates and reconnects. A gRPC
            # channel by itself would wait up to two minutes before it reconnects.
            self._senders.pop(signal).close()
        return outcome

    def close(self) -> None:
        """Close every connection."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _open(self, there: Variables) -> HttpSender | GrpcSender:
        if doubt := there.doubt():
            errors.warn_once(doubt, "%s", doubt)
        if there.protocol == "grpc":
            from otel_ddp.agent.export.otlp.over_grpc import GrpcSender

            return GrpcSender(there)
        return HttpSender(there)


def silence_libraries() -> None:
    """Silence the log lines of libraries on failures, as some contain credentials. We log
    failures."""
    logging.getLogger("opentelemetry.util.re").setLevel(logging.CRITICAL + 1)
    # grpc reads this variable when it is imported. Without it, its C core prints a line for each
    # failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


# -- over HTTP


class HttpSender:
    """Sends the requests of one signal over HTTP."""

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
        packed = gzip.compress(body, 6) if self._compression == "gzip" else body
        try:
            self._route = self._route or Route(self._url, self._timeout_s, self._tls)
            with self._route.post(packed, self._headers) as response:
                outcome = self._outcome_of(response)
                if not response.isclosed():
                    # Part of the reply is unread. Close the connection instead of waiting for the
                    # rest.
                    self.close()
                return outcome
        except UNANSWERED as error:
            where = without_credentials(self._url)
            return Outcome("retry", explain(error, where, self._timeout_s))
        except ValueError:
            # Omit the error's text, which could contain a header with a token.
            return Outcome("retry", "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent")

    def close(self) -> None:
        if self._route is not None:
            self._route.close()

    def _outcome_of(self, response: HTTPResponse) -> Outcome:
        status = response.status
        where = without_credentials(self._url, with_path=True)
        about_the_route = 300 <= status < 400 or status in ABOUT_THE_ROUTE
        reply = b"" if about_the_route else _reply(response)
        if 200 <= status < 300:
            return accepted_with(reply, where)
        why = f"{status} from {where}"
        if status == 400 and _is_tls_port(response, reply):
            # Retry: the server has not read the request, and the user can correct the address.
            return Outcome("retry", f"{why}: it wants https:// (OTEL_EXPORTER_OTLP_ENDPOINT)")
        after_s = _retry_after_s(response.headers.get("Retry-After"))
        return answered(status, why, _detail(response, reply), self._signal, after_s)


def _reply(response: HTTPResponse) -> bytes:
    try:
        return response.read(_REPLY_LIMIT_BYTES)
    except UNANSWERED:
        # The status has arrived, which decides the outcome. The text is not needed.
        return b""


def _detail(response: HTTPResponse, reply: bytes) -> str:
    """Why the collector refused a request: the message of a google.rpc.Status, or plain text."""
    kind = response.headers.get("Content-Type", "")
    if "protobuf" in kind:
        try:
            return one_line(Status.FromString(reply).message)
        except DecodeError:
            return ""
    return one_line(reply.decode("utf-8", "replace")) if kind.startswith("text/plain") else ""


def _is_tls_port(response: HTTPResponse, reply: bytes) -> bool:
    """Whether a TLS port has answered 400 because the request came without TLS."""
    # In this case, Go servers such as the collector send no headers. Their text is often lost,
    # because they close the connection while we write. nginx and Apache send these words.
    return not response.headers or b"plain http" in reply.lower()


def _retry_after_s(text: str | None) -> float:
    """The number of seconds in the Retry-After header; 0 for other text, such as a date."""
    with contextlib.suppress(TypeError, ValueError):
        return max(float(text or ""), 0.0)
    return 0.0
