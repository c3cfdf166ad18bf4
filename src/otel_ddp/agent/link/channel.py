"""One end of a link: TLS over a connection, and messages that each begin with their length."""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod

from otel_ddp.agent.link.credentials import NAME

# The largest messages, and when a peer is dead: to these both ends keep.
MOST_REPORT_BYTES = 4 << 20
MOST_ANSWER_BYTES = 1 << 20
# What an end writes into a message as it sends it.
STAMP_BYTES = 1024
MOST_NODE_LETTERS = 253

# A follower that has nothing to send pings, and the lead answers each ping. A shorter time would
# cut off a node that is busy.
PING_EVERY_S = 2.0
DEAD_AFTER_S = 8.0

_LENGTH_BYTES = 4
_PIECE_BYTES = 1 << 16
# A peer may take a tenth of this thread, whatever it sends: it rests for so many times as long.
_RESTS = 9


class Channel(asyncio.Protocol, ABC):
    """Called in the thread of links alone. An empty message is a ping, or the answer to one."""

    transport: asyncio.Transport

    def __init__(self, context: ssl.SSLContext, most_bytes: int) -> None:
        """*most_bytes*: of one message of the peer."""
        # asyncio's own TLS holds 256 KiB a connection, and does not show one in its handshake.
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        leads = context.protocol is ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=leads,
            server_hostname=None if leads else NAME,
        )
        self._most_bytes = most_bytes
        self._unread = bytearray()
        self._held = set[str]()
        self.is_proved = False
        """Whether the peer has shown that it has the secret."""
        self.is_writable = True
        """Whether the transport takes more: its buffer is not full."""
        self.began_s = self.heard_s = self.sent_s = time.monotonic()

    # -- for those who use it

    def send(self, message: bytes) -> None:
        if self.is_proved and not self.transport.is_closing():
            self.sent_s = time.monotonic()
            self._tls.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
            self._flush()

    def hold(self, why: str, holds: bool) -> None:
        """Take no message, and read nothing, while there is any reason not to."""
        if self.transport.is_closing():
            return
        if holds:
            self._held.add(why)
            self.transport.pause_reading()
        elif why in self._held:
            self._held.remove(why)
            if not self._held:
                self.transport.resume_reading()
                self._take_messages()

    def proved(self) -> None:
        """The peer has the secret: from here on both ends can send."""

    @abstractmethod
    def received(self, message: bytes) -> None:
        """The next message of the peer."""

    # -- as asyncio calls it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        # A follower begins the handshake.
        self._advance()

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        self._advance()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True

    def _advance(self) -> None:
        try:
            if not self.is_proved:
                self._tls.do_handshake()
                self.is_proved = True
                self.proved()
            while data := self._tls.read(_PIECE_BYTES):
                self._unread += data
                # A large message lasts on a slow network.
                self.heard_s = time.monotonic()
                self._take_messages()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError:
            # A peer without the secret hears why, by a TLS alert.
            self._flush()
            self.transport.close()
        else:
            self.transport.close()

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self.transport.write(data)

    def _take_messages(self) -> None:
        unread = self._unread
        while len(unread) >= _LENGTH_BYTES and not (self._held or self.transport.is_closing()):
            size = int.from_bytes(unread[:_LENGTH_BYTES], "big")
            until = _LENGTH_BYTES + size
            if size > self._most_bytes:
                self.transport.abort()
                return
            if len(unread) < until:
                return
            message = bytes(unread[_LENGTH_BYTES:until])
            del unread[:until]
            began_s = time.thread_time()
            self.received(message)
            took_s = time.thread_time() - began_s
            self.hold("rests", True)
            asyncio.get_running_loop().call_later(_RESTS * took_s, self.hold, "rests", False)
