"""Ends an attempt over HTTP at its deadline, even if the server sends one byte at a time.

A socket's timeout is for one read and starts again with each byte. Headers, bodies and interim
answers that arrive slowly could extend an attempt without end, and `requests` has no total timeout.
So each connect, send and read first sets the timeout to what is left.

Another thread that closes the socket would need the same access to it, and would race with its
reuse.
"""

from __future__ import annotations

import http.client
import io
import time
from contextvars import ContextVar
from typing import Any

import requests
from requests.adapters import HTTPAdapter

# The moment at which this thread's attempt ends; None outside of an attempt.
DEADLINE: ContextVar[float | None] = ContextVar("DEADLINE", default=None)


def enforce(session: requests.Session) -> None:
    """Make a session keep to the deadline; custom adapters are left as they are."""
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
    # Derived from the classes that it has: a SOCKS proxy has others.
    manager.pool_classes_by_scheme = {
        scheme: pool if issubclass(pool.ConnectionCls, _Connection) else _pool(pool)
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }


def _pool(of: Any) -> Any:
    connection = type(of.ConnectionCls.__name__, (_Connection, of.ConnectionCls), {})
    return type(of.__name__, (of,), {"ConnectionCls": connection})


class _Reader(io.RawIOBase):
    """Reads from a socket, each time within what is left."""

    def __init__(self, sock: Any, raw: Any) -> None:
        self._sock = sock
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _set_timeout(self._sock)
        read: int | None = self._raw.readinto(buffer)
        return read

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """Reads status, headers and body through that reader."""

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
            _set_timeout(self.sock)
        super().send(data)  # type: ignore[misc]


def _set_timeout(sock: Any) -> None:
    sock.settimeout(_left_s(sock.gettimeout()))


def _left_s(otherwise: Any) -> Any:
    deadline = DEADLINE.get()
    if deadline is None:
        return otherwise
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
