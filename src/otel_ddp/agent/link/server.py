"""The lead's end of the links of one run: a server to which the other agents connect.

It listens in the link thread. A peer without the run's secret fails in the TLS handshake. What a
peer sends can only fill a limited amount of memory. If the server refuses a message, it counts the
refusal and closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp import __version__
from otel_ddp.agent.link import credentials
from otel_ddp.agent.link.channel import BROKEN, MOST_NODE_LETTERS, Channel, LinkThread, accepted
from otel_ddp.agent.link.link_pb2 import Answer, Report

log = logging.getLogger("otel_ddp.agent")

_MOST_NODES = 2048
# Limit of connections on which no first report has arrived yet.
_MOST_STRANGERS = 128
_MOST_WAITING_BYTES = 32 << 20
_BACKLOG = 1024
_ACCEPT_AGAIN_S = 0.1
# `::` accepts IPv6 and IPv4; 0.0.0.0 is used on kernels without IPv6.
_ALL, _LOOPBACK = ("::", "0.0.0.0"), ("127.0.0.1",)


def _bound(hosts: Sequence[str], ports: Sequence[int]) -> socket.socket | None:
    """Listen on all addresses, since a node may connect to any of *hosts*.

    If all of *hosts* are loopback addresses, listen on loopback only.
    """
    is_local = all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)
    for address in _LOOPBACK if is_local else _ALL:
        for port in ports:
            with contextlib.suppress(OSError, ValueError):
                return socket.create_server(
                    (address, port),
                    family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                    dualstack_ipv6=address == "::",
                    backlog=_BACKLOG,
                )
    return None


class _Refused(Exception):
    """The server refuses a message. The text is the reason, sent to the peer and shown by
    `status`."""


class LinkServer:
    """The server of one run that this agent leads. `start` and `stop` return at once.

    The agent's loop calls `start`, `stop`, `take` and `answer`; all else runs in the link thread.
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
        """*node*: the name of this node. *hosts*: the node's host names and addresses.

        *ports*: the server uses the first free one. *clock*: the clock of the lead, to which the
        followers (the agents on the other nodes) measure the offset of their own clocks.
        """
        self._thread = thread
        self._context = credentials.context(secret, leads=True)
        self._hosts, self.ports = hosts, ports
        self._node, self._most_nodes = node, most_nodes
        self._clock = clock
        # Reports that wait for the agent's loop. They are not parsed yet, so their size in memory
        # is known. The oldest are dropped beyond a limit: their records are still in the journals
        # of their nodes, and are requested again.
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        # The tasks of connections on which no first report has arrived yet, oldest first.
        self._strangers: dict[Any, None] = {}
        # For each node, the connection that is in use.
        self._peers: dict[str, Channel] = {}
        self.refused: Counter[str] = Counter()
        """Refused messages by reason."""
        self.state = "does not listen yet"
        """The state of the server, for `status`."""

    def start(self) -> None:
        self._thread.add(self._listen)

    def stop(self) -> None:
        """Stop listening, and close all connections."""
        self._thread.discard(self._listen)

    def take(self) -> Iterator[tuple[str, Any]]:
        """The reports since the last call, in order of arrival, each with its node's name."""
        with self._lock:
            taken, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
        for node, message in taken:
            yield node, Report.FromString(message)

    def answer(self, node: str, answer: Any) -> None:
        """Send an answer if the node is connected. If the answer is lost, a later one replaces
        it."""
        if node in self._peers:
            self._thread.call(partial(self._send, node, answer))

    # -- in the link thread

    async def _listen(self) -> None:
        """Listen until an error. The link thread calls it again some seconds after it returns."""
        listener = _bound(self._hosts, self.ports)
        if listener is None:
            self.state = f"cannot listen: its ports {', '.join(map(str, self.ports))} are taken"
            return
        loop, serving = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        with listener:
            listener.setblocking(False)
            address, port = listener.getsockname()[:2]
            where = "all addresses" if address in _ALL else address
            self.state = f"listens on port {port} of {where}"
            log.info("the lead of a run %s", self.state)
            try:
                while True:
                    # Let the other tasks run: a flood of connections must not starve the peers.
                    await asyncio.sleep(0)
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError:
                        await asyncio.sleep(_ACCEPT_AGAIN_S)
                        continue
                    task = loop.create_task(self._serve(connection))
                    serving.add(task)
                    task.add_done_callback(serving.discard)
                    self._strangers[task] = None
                    if len(self._strangers) > _MOST_STRANGERS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        oldest.cancel()
            finally:
                self.state = "does not listen"
                for each in serving:
                    each.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        task, peer = asyncio.current_task(), None
        try:
            peer = await accepted(connection, self._context)
            while True:
                self.receive(peer, await peer.receive())
                self._strangers.pop(task, None)
        except BROKEN:
            pass
        finally:
            self._strangers.pop(task, None)
            if peer is not None:
                self.gone(peer)
                peer.abort()

    def receive(self, peer: Channel, message: bytes) -> None:
        """Process a message of a peer. Acknowledge it, or refuse it and close the connection."""
        received_ns = self._clock()
        try:
            report = _parsed(message)
            if peer.greeting is None:
                self._admit(report, peer)
            else:
                self._keep(peer.greeting.node, message)
        except _Refused as refused:
            self.refused[str(refused)] += 1
            self._end(peer, str(refused))
            return
        times = {"report_sent_ns": report.sent_ns, "report_received_ns": received_ns}
        peer.send(self._stamped(Answer(**times)))

    def gone(self, peer: Channel) -> None:
        """Forget a peer whose connection has ended."""
        if peer.greeting is not None and self._peers.get(peer.greeting.node) is peer:
            del self._peers[peer.greeting.node]

    def _send(self, node: str, answer: Any) -> None:
        if (peer := self._peers.get(node)) is not None:
            peer.send(self._stamped(answer))

    def _keep(self, node: str, message: bytes) -> None:
        with self._lock:
            self._waiting.append((node, message))
            self._waiting_bytes += len(message)
            while self._waiting_bytes > _MOST_WAITING_BYTES:
                self._waiting_bytes -= len(self._waiting.popleft()[1])

    def _admit(self, greeting: Any, peer: Channel) -> None:
        """Use *peer* as the connection of its node. Raises _Refused if that is not allowed."""
        node = greeting.node
        if not (0 < len(node) <= MOST_NODE_LETTERS and node.isprintable()):
            raise _Refused("no name of a node")
        if greeting.version != __version__:
            raise _Refused(f"the nodes of a run need one version of otel_ddp, {__version__}")
        if node == self._node:
            raise _Refused("the lead's node has this name: give each one its OTEL_DDP_NODE")
        old = self._peers.get(node)
        if old is None and len(self._peers) >= self._most_nodes:
            raise _Refused(f"the lead takes {self._most_nodes} nodes")
        if old is not None:
            if greeting.agent_began_ns < old.greeting.agent_began_ns:
                raise _Refused("a newer agent of this node is connected (OTEL_DDP_NODE)")
            # Either the node's agent has given up its old connection, or a newer agent has started
            # on the node: close the old one.
            self._end(old, "a newer stream of this node has replaced it")
        # Of the first report, keep only the fields that are read later.
        peer.greeting = Report(node=node, agent_began_ns=greeting.agent_began_ns)
        self._peers[node] = peer

    def _end(self, peer: Channel, why: str) -> None:
        peer.end(self._stamped(Answer(refused=why)))

    def _stamped(self, answer: Any) -> bytes:
        answer.node, answer.sent_ns = self._node, self._clock()
        return bytes(answer.SerializeToString())


def _parsed(message: bytes) -> Any:
    try:
        return Report.FromString(message)
    except DecodeError:
        raise _Refused("a report that cannot be read") from None
