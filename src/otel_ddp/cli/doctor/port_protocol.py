"""Finds out which protocol a port speaks, where an exporter's error does not tell it."""

from __future__ import annotations

import socket
import time
from typing import Literal
from urllib.parse import urlsplit

PortProtocol = Literal["gRPC", "HTTP", "Prometheus", ""]

_LONGEST_RESPONSE = 4096
_GET = b"GET /-/healthy HTTP/1.0\r\n\r\n"
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def protocol_of(url: str, limit_s: float) -> PortProtocol:
    """The protocol without TLS; empty if it is unknown, or if nothing listens."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        address = (parts.hostname or "", parts.port or 80)
        response = _response(address, limit_s)
    except (OSError, ValueError):
        return ""
    if not response.startswith(b"HTTP/1."):
        return "gRPC" if _is_frame(response) else ""
    if b"https" in response.lower():
        return ""  # a TLS port answers a request without TLS so
    return "Prometheus" if b"Prometheus Server is" in response else "HTTP"


def _is_frame(response: bytes) -> bool:
    """Whether it begins with settings, as HTTP/2 does; a gRPC server sends them unasked."""
    return (
        len(response) >= len(_SETTINGS)
        and response[3:4] + response[5:9] == _SETTINGS[3:4] + _SETTINGS[5:9]
    )


def _response(address: tuple[str, int], limit_s: float) -> bytes:
    """What it sends until it closes, or the time is over."""
    deadline = time.monotonic() + limit_s
    response = b""
    with socket.create_connection(address, timeout=limit_s) as connection:
        try:
            connection.sendall(_GET)
            while len(response) < _LONGEST_RESPONSE and not _is_frame(response):
                # With no time left, recv does not wait and raises, which ends this too.
                connection.settimeout(max(deadline - time.monotonic(), 0.0))
                if not (more := connection.recv(_LONGEST_RESPONSE)):
                    break
                response += more
        except OSError:
            pass  # closed, or silent: what was received before counts
    return response
