"""The lead's end of the links of one run: a server that the agents of the other nodes connect to.

It listens in the thread of links. A peer without the run's secret gets no further than its
handshake. All bounds are on what the others can make it keep. What is refused is counted, and ends
its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp import __version__
from otel_ddp.agent.link import addresses, credentials
from otel_ddp.agent.link.channel import (
    DEAD_AFTER_S,
    MOST_ANSWER_BYTES,
    MOST_NODE_LETTERS,
    MOST_REPORT_BYTES,
    PING_EVERY_S,
    STAMP_BYTES,
    Channel,
)
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.link_thread import LinkThread

log = logging.getLogger("otel_ddp.agent")

_MOST_NODES = 2048
_MOST_WAITING_BYTES = 32 << 20
# Processes in one report: an agent begins another report long before.
_MOST_PARTS = 8192
# What says nothing takes two bytes on its way, and so many once it is parsed.
_PART_BYTES, _PIECE_BYTES = 160, 32
_LATE_EVERY_S = 0.5


# -- its door

# Of those that say nothing, and of those in their handshakes.
_MOST_UNPROVED = 128
_PROVED_WITHIN_S = 5.0
# What a peer does not acknowledge in time ends its connection.
_ACKNOWLEDGED_WITHIN_MS = 5000
_BACKLOG = 1024
# In one round of the loop: those that are here are served as well.
_ACCEPTED_AT_ONCE = 16


class Door:
    """Accepts connections, and bounds those that have not yet proved that they know the secret.

    Beyond the bound the oldest is closed: a proof takes a moment. Silent connections have a bound
    of their own, so they displace none that speaks.
    """

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


# -- its peers


class _Refused(Exception):
    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


class _Peer(Channel):
    """A connection of another node, or of a stranger."""

    def __init__(self, server: LinkServer, door: Door) -> None:
        super().__init__(server.context, MOST_REPORT_BYTES + STAMP_BYTES)
        self._server, self._door = server, door
        self.greeting: Any = None
        """Who it is, by its first report; None: that has not come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.came(self)

    def data_received(self, data: bytes) -> None:
        self._door.spoke(self)
        super().data_received(data)
        if time.monotonic() - self.sent_s > PING_EVERY_S:
            # Pings of the follower wait behind its message: it hears that this one comes.
            self.send(b"")

    def received(self, message: bytes) -> None:
        if not message:
            self.send(b"")
            return
        self._server.heard(self, message)
        if self.greeting is not None:
            self._door.admit(self)

    def end(self, answer: bytes) -> None:
        """Send a last answer, and close it."""
        self.send(answer)
        self.transport.close()

    def pause_writing(self) -> None:
        self.is_writable = False
        # Each report is answered: what is not read there would pile up here.
        self.hold("reads no answers", True)

    def resume_writing(self) -> None:
        self.is_writable = True
        self.hold("reads no answers", False)

    def connection_lost(self, error: Exception | None) -> None:
        self._door.gone(self)
        self._server.gone(self)


class WaitingReports:
    """Reports that wait for the judge, bounded: what is dropped is in the journals still.

    One thread adds to it, and another one takes all. Of too many the oldest are dropped.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[str, int, Any]] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, node: str, report: Any, size: int) -> None:
        """*size*: its length in bytes."""
        with self._lock:
            self._waiting.append((node, size, report))
            self._bytes += size
            while self._bytes > self._most_bytes:
                self._bytes -= self._waiting.popleft()[1]

    def take(self) -> list[tuple[str, Any]]:
        """All, as they came; they no longer wait."""
        with self._lock:
            taken, self._waiting = self._waiting, deque()
            self._bytes = 0
        return [(node, report) for node, _, report in taken]


class LinkServer:
    """One a run that this agent leads. `start` and `stop` return at once.

    These, `take` and `answer` are called in the agent's loop, all else in the thread of links.
    """

    def __init__(
        self,
        thread: LinkThread,
        secret: bytes,
        *,
        node: str,
        hosts: Sequence[str],
        ports: Sequence[int],
        most_nodes: int = _MOST_NODES,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """*node*: this one; *hosts*: its names that others look for; *ports*: the candidates.

        *clock*: that to which the others turn their times.
        """
        self._thread = thread
        self.context = credentials.context(secret, leads=True)
        self._hosts, self.ports = hosts, ports
        # Journals need descriptors too.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._node, self._most_nodes = node, min(most_nodes, files // 2)
        self._clock = clock
        self._agent = random.getrandbits(64)
        self._waiting = WaitingReports(_MOST_WAITING_BYTES)
        # By node.
        self._peers: dict[str, _Peer] = {}
        self.refused: Counter[str] = Counter()
        """How many connections and reports were not taken, by reason."""
        self.state = "does not listen yet"
        """What `status` says of it."""

    def start(self) -> None:
        self._thread.add(self._listen)

    def stop(self) -> None:
        """Listen no more, and end all streams."""
        self._thread.discard(self._listen)

    def take(self) -> list[tuple[str, Any]]:
        """The reports since the last call, each with its node, as they came."""
        return self._waiting.take()

    def answer(self, node: str, answer: Any) -> None:
        """Send it, unless the node is away or reads no answers: the lead says all of it again.

        What is too large goes without how the run is judged.
        """
        if node not in self._peers:
            return
        if answer.ByteSize() > MOST_ANSWER_BYTES:
            # It would end the stream.
            self.refused["large answer"] += 1
            answer.ClearField("judged")
            if not 0 < answer.ByteSize() <= MOST_ANSWER_BYTES:
                return
        self._thread.call(lambda: self._send(node, answer))

    # -- in the thread of links

    async def _listen(self) -> None:
        """It is called again some seconds after it returned."""
        where = await addresses.to_listen_on(self._hosts)
        door = Door()
        try:
            port = await door.listen(where, self.ports, lambda: _Peer(self, door))
            if not port:
                taken = ", ".join(map(str, self.ports))
                names = addresses.names(where)
                self.state = f"cannot listen on {names}: its ports {taken} are taken"
                return
            self.state = f"listens on port {port} of {addresses.names(where)}"
            log.info("the lead of a run %s", self.state)
            try:
                while True:
                    await asyncio.sleep(_LATE_EVERY_S)
                    door.close_late()
            finally:
                self.state = "does not listen"
        finally:
            door.close()

    def heard(self, peer: _Peer, message: bytes) -> None:
        """A message has come."""
        try:
            report = _parsed(message)
            report.received_ns = self._clock()
            if peer.greeting is None:
                self._admit(report, peer)
            else:
                self._take(peer.greeting, report, len(message))
        except _Refused as refused:
            self.refused[refused.why] += 1
            self._end(peer, str(refused))
            return
        times = {"report_sent_ns": report.sent_ns, "report_received_ns": report.received_ns}
        peer.send(self._stamped(Answer(**times)))

    def gone(self, peer: _Peer) -> None:
        """It has no connection any more."""
        if peer.greeting is not None and self._peers.get(peer.greeting.node) is peer:
            del self._peers[peer.greeting.node]

    def _send(self, node: str, answer: Any) -> None:
        peer = self._peers.get(node)
        if peer is not None and peer.is_writable:
            peer.send(self._stamped(answer))

    def _take(self, greeting: Any, report: Any, size: int) -> None:
        if (report.node, report.agent) != (greeting.node, greeting.agent):
            raise _Refused("other node", "a report of another node")
        parts = len(report.processes)
        if parts > _MOST_PARTS:
            raise _Refused("too many parts", "a report of too many parts")
        size += _PART_BYTES * parts + _PIECE_BYTES * _pieces(report)
        self._waiting.add(report.node, report, size)

    def _admit(self, greeting: Any, peer: _Peer) -> None:
        """Take this connection for the node's, if nothing speaks against it."""
        node = greeting.node
        if not (0 < len(node) <= MOST_NODE_LETTERS and node.isprintable()):
            raise _Refused("no name", "this is no name of a node")
        if greeting.version != __version__:
            text = f"its otel_ddp is {__version__}, and the nodes of a run need one version"
            raise _Refused("other version", text)
        old = self._peers.get(node)
        if old is None and len(self._peers) >= self._most_nodes:
            raise _Refused("too many nodes", f"the lead takes {self._most_nodes} nodes")
        if old is not None:
            known = old.greeting
            if greeting.agent != known.agent and greeting.agent_began_ns <= known.agent_began_ns:
                text = f"a newer agent of a node {node!r} is connected (OTEL_DDP_NODE)"
                raise _Refused("second agent", text)
            # Dead, as far as the node's agent knows, or of an agent that has ended.
            self._end(old, "a newer stream of this node has replaced it")
        # What else it says takes memory, and counts for nothing.
        began_ns = greeting.agent_began_ns
        peer.greeting = Report(node=node, agent=greeting.agent, agent_began_ns=began_ns)
        self._peers[node] = peer

    def _end(self, peer: _Peer, why: str) -> None:
        peer.end(self._stamped(Answer(refused=why)))

    def _stamped(self, answer: Any) -> bytes:
        answer.node, answer.agent, answer.sent_ns = self._node, self._agent, self._clock()
        return bytes(answer.SerializeToString())


def _pieces(report: Any) -> int:
    stretches = [part for each in report.processes for part in (each.definitions, each.records)]
    return sum(len(each.at) + len(each.content) for each in stretches)


def _parsed(message: bytes) -> Any:
    try:
        return Report.FromString(message)
    except DecodeError:
        raise _Refused("unreadable", "a report that cannot be read") from None
