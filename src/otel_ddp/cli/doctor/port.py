"""Finds out what is spoken on a port, where what an exporter says of it does not tell."""

from __future__ import annotations

import socket
import time
from typing import Literal
from urllib.parse import urlsplit

Spoken = Literal["gRPC", "HTTP", "Prometheus", ""]

_LONGEST_ANSWER = 4096
_GET = b"GET /-/healthy HTTP/1.0\r\n\r\n"
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def spoken(url: str, limit_s: float) -> Spoken:
    """What is spoken there without TLS; empty where that is nothing known, or nobody is there."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        address = (parts.hostname or "", parts.port or 80)
        said = _answer(address, limit_s)
    except (OSError, ValueError):
        return ""
    if not said.startswith(b"HTTP/1."):
        return "gRPC" if _is_frame(said) else ""
    if b"https" in said.lower():
        return ""  # what a TLS port says to those who come without
    return "Prometheus" if b"Prometheus Server is" in said else "HTTP"


def _is_frame(said: bytes) -> bool:
    """Whether it begins as HTTP/2 does, with settings; a gRPC server says them unasked."""
    return len(said) >= len(_SETTINGS) and said[3:4] + said[5:9] == _SETTINGS[3:4] + _SETTINGS[5:9]


def _answer(address: tuple[str, int], limit_s: float) -> bytes:
    """What it says until it closes, or the time is over."""
    deadline = time.monotonic() + limit_s
    said = b""
    with socket.create_connection(address, timeout=limit_s) as connection:
        try:
            connection.sendall(_GET)
            while len(said) < _LONGEST_ANSWER and not _is_frame(said):
                # With none left it does not wait, which ends this as well.
                connection.settimeout(max(deadline - time.monotonic(), 0.0))
                if not (more := connection.recv(_LONGEST_ANSWER)):
                    break
                said += more
        except OSError:
            pass  # closed in anger, or silent: what it said before counts
    return said
