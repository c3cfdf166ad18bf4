"""Explains in one line why a request over HTTP was not answered."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import requests

from otel_ddp.agent.export.otlp.addresses import without_credentials
from otel_ddp.agent.export.otlp.outcome import one_line

# Every error whose text could repeat a header, and with it a token.
_HEADER = (requests.exceptions.InvalidHeader, UnicodeError)
_NO_ADDRESS = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)


def explain(error: BaseException, url: str, timeout_s: float) -> str:
    """The reason, for people; never the text of a header."""
    where = without_credentials(url)
    if isinstance(error, _HEADER):
        return "a header from OTEL_EXPORTER_OTLP_HEADERS cannot be sent"
    if isinstance(error, _NO_ADDRESS):
        return f"{where} is no address of a collector; http://host:4318 would be one"
    found = list(causes(error))
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
    for cause in found:
        if isinstance(cause, OSError) and cause.strerror:
            return f"no way to {where}: {one_line(cause.strerror)}"
    if type(error) is OSError:
        return f"no way to {where}: {one_line(str(error))}"
    return f"no way to {where}: {type(error).__name__}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it wraps: requests and urllib3 each hide the cause in their own way."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        this = waiting.pop(0)
        if not isinstance(this, BaseException) or id(this) in seen:
            continue
        seen.add(id(this))
        yield this
        waiting += [*this.args, getattr(this, "reason", None), this.__cause__, this.__context__]
