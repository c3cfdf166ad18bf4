"""One end of a link: TLS over a connection, and messages that each begin with their length."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import time
from asyncio.sslproto import SSLProtocol
from typing import Any

from otel_ddp.agent.link.credentials import NAME
from otel_ddp.agent.link.link_thread import within

MOST_BYTES = 4 << 20
"""Size limit of a message; a peer that exceeds it is disconnected."""
MOST_NODE_LETTERS = 253
DEAD_AFTER_S = 8.0
"""A follower reports more often, and each report is answered."""
BROKEN = (OSError, EOFError, UnicodeError, asyncio.TimeoutError)
"""What a connection raises that ends, or cannot be."""

_LENGTH_BYTES = 4
_PROVED_WITHIN_S = 5.0
# A peer may take a tenth of this thread, whatever it sends: it rests for so many times as long.
_RESTS, _LEAST_REST_S = 9, 0.01
if sys.version_info >= (3, 11):
    # Of each connection, as long as it lasts: asyncio would take 256 KiB.
    SSLProtocol.max_size = 1 << 12


class Channel:
    """Called in the thread of links alone."""

    greeting: Any = None
    """What its other end has said of itself; None: nothing yet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._received_s = time.thread_time()

    def send(self, message: bytes) -> None:
        """To one that does not read nothing more is sent, nor what would end the link."""
        transport = self._writer.transport
        is_full = max(len(message), transport.get_write_buffer_size()) > MOST_BYTES
        if not (is_full or transport.is_closing()):
            self._writer.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)

    async def receive(self) -> bytes:
        """The next message of a peer that has the secret; raises one of BROKEN."""
        await asyncio.sleep(_LEAST_REST_S + _RESTS * (time.thread_time() - self._received_s))
        message = await within(DEAD_AFTER_S, self._next())
        self._received_s = time.thread_time()
        return message

    async def _next(self) -> bytes:
        size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        if size > MOST_BYTES or self._writer.is_closing():
            raise ConnectionAbortedError
        return await self._reader.readexactly(size)

    def end(self, message: bytes) -> None:
        """Send a last message, and close it."""
        self.send(message)
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


async def connected(address: str, port: int, context: ssl.SSLContext) -> Channel:
    """A connection to what has the secret, as far as it has proved that; raises one of BROKEN."""
    made = asyncio.open_connection(address, port, ssl=context, server_hostname=NAME)
    return Channel(*await within(_PROVED_WITHIN_S, made))


async def accepted(connection: socket.socket, context: ssl.SSLContext) -> Channel:
    """The same of a connection that has come."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    made = loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
    transport, _ = await within(_PROVED_WITHIN_S, made)
    return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
