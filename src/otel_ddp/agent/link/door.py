"""Accepts connections for the lead. Few may wait that have not proved that they know the secret.

Of too many that are unproved the oldest is closed: a proof takes a moment. Those that say nothing
are counted apart, and take nothing of those that speak.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence

from otel_ddp.agent.link.channel import DEAD_AFTER_S, Channel

# Of those that say nothing, and of those in their handshakes.
_MOST_UNPROVED = 128
_PROVED_WITHIN_S = 5.0
# What a peer does not acknowledge in time ends its connection.
_ACKNOWLEDGED_WITHIN_MS = 5000
_BACKLOG = 1024
# In one round of the loop: those that are here are served as well.
_ACCEPTED_AT_ONCE = 16


class Door:
    """One a server, in the thread of links."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        # The oldest first.
        self._silent: dict[Channel, None] = {}
        self._speaking: dict[Channel, None] = {}
        self._admitted: dict[Channel, None] = {}
        self._is_open = True

    async def listen(
        self, addresses: Sequence[str], ports: Sequence[int], made: Callable[[], Channel]
    ) -> int:
        """The first port that is free on all addresses, where it accepts from now on; 0: none.

        *made*: the channel of a new connection, which tells the door what becomes of it.
        """
        for port in ports:
            with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
                sockets = [bound.enter_context(_bound(each, port)) for each in addresses]
                loop = asyncio.get_running_loop()
                for each in sockets:
                    # Nothing is awaited until all are the servers', which `close` ends.
                    server = await loop.create_server(
                        made, sock=each, backlog=_ACCEPTED_AT_ONCE, start_serving=False
                    )
                    self._servers.append(server)
                bound.pop_all()
                for server, each in zip(self._servers, sockets, strict=True):
                    await server.start_serving()
                    each.listen(_BACKLOG)
                return port
        return 0

    def came(self, channel: Channel) -> None:
        if self._is_open:
            _add(self._silent, channel)
        else:
            channel.transport.abort()

    def spoke(self, channel: Channel) -> None:
        if channel in self._silent:
            del self._silent[channel]
            _add(self._speaking, channel)

    def admit(self, channel: Channel) -> None:
        """It is that of a node."""
        self._speaking.pop(channel, None)
        self._admitted[channel] = None

    def gone(self, channel: Channel) -> None:
        for each in (self._silent, self._speaking, self._admitted):
            each.pop(channel, None)

    def close_late(self) -> None:
        """Close those that had time enough to prove it, and those that are heard no longer."""
        now_s = time.monotonic()
        for each in [*self._silent, *self._speaking]:
            if now_s - each.began_s > _PROVED_WITHIN_S:
                each.transport.abort()
        for each in [*self._admitted]:
            if now_s - each.heard_s > DEAD_AFTER_S:
                each.transport.abort()

    def close(self) -> None:
        """Accept no more, and end all connections."""
        self._is_open = False
        for server in self._servers:
            server.close()
        for each in [*self._silent, *self._speaking, *self._admitted]:
            each.transport.abort()


def _add(waiting: dict[Channel, None], channel: Channel) -> None:
    waiting[channel] = None
    if len(waiting) > _MOST_UNPROVED:
        oldest = next(iter(waiting))
        del waiting[oldest]
        oldest.transport.abort()


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # That of IPv6 for all addresses takes both kinds.
    both = address == "::" and socket.has_dualstack_ipv6()
    made = socket.create_server((address, port), family=family, dualstack_ipv6=both)
    # Those that it accepts have it as well.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ACKNOWLEDGED_WITHIN_MS)
    return made
