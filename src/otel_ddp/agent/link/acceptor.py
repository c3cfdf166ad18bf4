"""Accepts connections for the lead. Few may wait that have not proved that they know the secret.

gRPC takes 60 KB for a connection as it accepts it, and cannot bound those in a handshake alone. So
the port is ours. A connection that speaks is passed on to gRPC, which does TLS and all else, by a
socket inside this process. Of too many that are unproved the oldest is closed: a proof takes a
moment. Those that say nothing are counted apart, and take nothing of those that speak.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

# Of those that say nothing, and of those in their handshakes.
_MOST_UNPROVED = 128
_PROVED_WITHIN_S = 5.0
# What a peer does not acknowledge in time ends its connection, as of gRPC's own.
_ACKNOWLEDGED_WITHIN_MS = 5000
_BACKLOG = 1024
_AGAIN_AFTER_S = 0.05
_SOCKET = "socket"


class _End(asyncio.Protocol):
    """One of two connections: what comes here is written to the other."""

    transport: asyncio.Transport

    def __init__(self, other: _End | None = None) -> None:
        self.other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        # The two hold each other until one is gone.
        other, self.other = self.other, None
        if other is not None:
            other.transport.close()


class _Outer(_End):
    """A connection of another node, or of a stranger."""

    def __init__(self, acceptor: Acceptor) -> None:
        super().__init__()
        self._acceptor = acceptor
        self.came_s = time.monotonic()
        self.name = ""
        """The address of the inner connection, as gRPC names its peer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._acceptor.came(self)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.transport.pause_reading()
            self._acceptor.pass_on(self, data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._acceptor.gone(self)


class Acceptor:
    """One a server, in the thread of links."""

    def __init__(self, add_port: Callable[[str], object]) -> None:
        """*add_port*: has gRPC's server listen at an address; may raise RuntimeError."""
        self._listening: list[socket.socket] = []
        # The oldest first.
        self._silent: dict[_Outer, None] = {}
        self._speaking: dict[_Outer, None] = {}
        self._by_name: dict[str, _Outer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # The socket's folder is gone at once: only who has a descriptor of it can connect.
        with tempfile.TemporaryDirectory(prefix="otel_ddp-") as folder:
            above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Its own path may be longer than that of a socket may be.
                add_port(f"unix:/proc/self/fd/{above}/{_SOCKET}")
                self._inner = os.open(_SOCKET, os.O_PATH | os.O_CLOEXEC, dir_fd=above)
            finally:
                os.close(above)

    def listen(self, addresses: Sequence[str], ports: Sequence[int]) -> int:
        """The first port that is free on all addresses, where it accepts from now on; 0: none."""
        for port in ports:
            try:
                for address in addresses:
                    self._listening.append(_bound(address, port))
            except OSError:
                while self._listening:
                    self._listening.pop().close()
                continue
            for each in self._listening:
                self._watch(each)
            return port
        return 0

    def proved(self, name: str) -> None:
        """gRPC serves a call of this connection, so its peer has the secret."""
        if (outer := self._by_name.get(name)) is not None:
            self._speaking.pop(outer, None)

    def close_late(self) -> None:
        """Close those that had time enough to prove it."""
        since_s = time.monotonic() - _PROVED_WITHIN_S
        for each in [*self._silent, *self._speaking]:
            if each.came_s < since_s:
                each.transport.abort()

    def stop(self) -> None:
        """Accept no more."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()

    async def close(self) -> None:
        """Close what gRPC's server, which has stopped, left open."""
        # Each takes a moment, and one that is cancelled would lose its socket.
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in [*self._silent, *self._speaking, *self._by_name.values()]:
            each.transport.abort()
            if each.other is not None:
                each.other.transport.abort()
        # The loop closes their sockets in its next round, and may have no other.
        await asyncio.sleep(0)
        os.close(self._inner)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        # The loop itself holds no task.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- one connection

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """One a round of the loop: those that are here are served as well."""
        loop = asyncio.get_running_loop()
        try:
            made, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left, and the loop would call us again at once.
            loop.remove_reader(listening)
            loop.call_later(_AGAIN_AFTER_S, self._watch, listening)
            return
        made.setblocking(False)
        self._begin(loop.connect_accepted_socket(lambda: _Outer(self), made))

    def came(self, outer: _Outer) -> None:
        _add(self._silent, outer)

    def gone(self, outer: _Outer) -> None:
        self._silent.pop(outer, None)
        self._speaking.pop(outer, None)
        self._by_name.pop(outer.name, None)

    def pass_on(self, outer: _Outer, first: bytes) -> None:
        """Connect it to gRPC. *first*: the bytes received so far."""
        self._silent.pop(outer, None)
        _add(self._speaking, outer)
        self._begin(self._connect(outer, first))

    async def _connect(self, outer: _Outer, first: bytes) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            made.bind("")  # to a name that the kernel chooses, in its abstract namespace
            made.connect(f"/proc/self/fd/{self._inner}")
            outer.name = f"unix-abstract:{made.getsockname()[1:].decode()}"
            loop = asyncio.get_running_loop()
            _, inner = await loop.create_connection(lambda: _End(outer), sock=made)
        except OSError:
            made.close()
            outer.transport.abort()
            return
        if outer.transport.is_closing():
            inner.transport.close()
            return
        outer.other, self._by_name[outer.name] = inner, outer
        inner.transport.write(first)
        outer.transport.resume_reading()


def _add(waiting: dict[_Outer, None], outer: _Outer) -> None:
    waiting[outer] = None
    if len(waiting) > _MOST_UNPROVED:
        oldest = next(iter(waiting))
        del waiting[oldest]
        oldest.transport.abort()


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # That of IPv6 for all addresses takes both kinds.
    both = address == "::" and socket.has_dualstack_ipv6()
    made = socket.create_server(
        (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
    )
    made.setblocking(False)
    # Those that it accepts have it as well.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ACKNOWLEDGED_WITHIN_MS)
    return made
