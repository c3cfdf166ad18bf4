"""Ends an attempt over HTTP at its deadline, however slowly the other side drips.

A socket's timeout is for one read, and begins anew with each byte that comes: headers, bodies and
interim answers that drip would hold an attempt for as long as somebody likes. So what connects,
sends and reads asks each time how much is left.
"""

from __future__ import annotations

import http.client
import io
import time
from contextvars import ContextVar
from typing import Any

import requests
from requests.adapters import HTTPAdapter

# When the attempt that this thread makes is over; None outside of one.
DEADLINE: ContextVar[float | None] = ContextVar("DEADLINE", default=None)


def make(session: requests.Session) -> None:
    """Let a session keep to the deadline; adapters of its own are left as they are."""
    for prefix, adapter in list(session.adapters.items()):
        if type(adapter) is HTTPAdapter:
            session.mount(prefix, _Adapter(max_retries=adapter.max_retries))


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        _use_our_connections(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        _use_our_connections(manager)
        return manager


def _use_our_connections(manager: Any) -> None:
    # Made of whatever classes it has: those of a SOCKS proxy are others.
    manager.pool_classes_by_scheme = {
        scheme: pool if issubclass(pool.ConnectionCls, _Connection) else _pool(pool)
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }


def _pool(of: Any) -> Any:
    connection = type(of.ConnectionCls.__name__, (_Connection, of.ConnectionCls), {})
    return type(of.__name__, (of,), {"ConnectionCls": connection})


class _Reader(io.RawIOBase):
    """What comes in through a socket."""

    def __init__(self, sock: Any, raw: Any) -> None:
        self._sock = sock
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _allow_what_is_left(self._sock)
        read: int | None = self._raw.readinto(buffer)
        return read

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """Status, headers and body are all read through this one file."""

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_Reader(sock, self.fp.detach()))


class _Connection:
    """Mixed into a connection of urllib3."""

    response_class = _Response
    sock: Any
    timeout: Any

    def connect(self) -> None:
        self.timeout = _left_s(self.timeout)
        super().connect()  # type: ignore[misc]

    def send(self, data: Any) -> None:
        if self.sock is not None:
            _allow_what_is_left(self.sock)
        super().send(data)  # type: ignore[misc]


def _allow_what_is_left(sock: Any) -> None:
    sock.settimeout(_left_s(sock.gettimeout()))


def _left_s(otherwise: Any) -> Any:
    deadline = DEADLINE.get()
    if deadline is None:
        return otherwise
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
