"""The lead's end of the links of one run: takes the reports of other nodes' agents, and answers.

It listens in the thread of links. All bounds are on what others can make it keep: a peer without
the run's secret gets no further than its handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp.agent.link import addresses, credentials, limits
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.link_thread import LinkThread
from otel_ddp.agent.link.waiting import WaitingReports

log = logging.getLogger("otel_ddp.agent")

_MOST_NODES = 2048
_MOST_WAITING_BYTES = 32 << 20
_MOST_ANSWERS = 16
# Twice as many as a follower keeps: it sends all at once after a cut.
_MOST_REPORTS_A_SECOND = 256
_HANDSHAKE_WITHIN_MS = 5000
_GREETING_WITHIN_S = 5.0


@dataclass(frozen=True)
class Heard:
    """What the lead knows of the link to a node."""

    address: str
    connected: bool
    since_ns: int
    last_ns: int
    """When its last report came."""


class _Refused(Exception):
    def __init__(self, why: str, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.why, self.code = why, code


class _Stream:
    """One node, as long as its agent is the same."""

    def __init__(self, greeting: Any) -> None:
        self.node: str = greeting.node
        self.agent: int = greeting.agent
        self.began_ns: int = greeting.agent_began_ns
        self.received = 0
        self.answers: deque[Any] = deque(maxlen=_MOST_ANSWERS)
        self.heard = Heard("", False, 0, 0)
        self.served: asyncio.Task[None] | None = None
        self.context: Any = None
        self.writes = asyncio.Lock()


class Lead:
    """One a run that this agent leads. `start` and `stop` return at once."""

    def __init__(
        self,
        thread: LinkThread,
        secret: bytes,
        *,
        node: str,
        hosts: Sequence[str],
        ports: Sequence[int],
    ) -> None:
        """*hosts*: the names of this node that others look for; *ports*: the candidates."""
        self._thread = thread
        self._credentials = credentials.of_lead(secret)
        self._node, self._hosts, self._ports = node, hosts, ports
        self._agent = random.getrandbits(64)
        self._waiting = WaitingReports(_MOST_WAITING_BYTES)
        self._streams: dict[str, _Stream] = {}
        self._writing: set[asyncio.Future[None]] = set()
        self.state = "does not listen yet"
        self.refused: Counter[str] = Counter()
        """How many streams and reports were not taken, by reason."""

    def start(self) -> None:
        self._thread.add(self._listen)

    def stop(self) -> None:
        """Listen no more, and end all streams."""
        self._thread.discard(self._listen)

    def take(self) -> list[tuple[str, Any]]:
        """The reports since the last call, each with its node, as they came."""
        return self._waiting.take()

    @property
    def dropped(self) -> int:
        """How many reports were dropped because `take` was not called in time."""
        return self._waiting.dropped

    def nodes(self) -> Mapping[str, Heard]:
        """All nodes that were heard, with the ends of their links."""
        return {node: stream.heard for node, stream in list(self._streams.items())}

    def answer(self, node: str, answer: Any) -> None:
        """Send it with the answer to the node's next report; at once if there are questions."""
        stream = self._streams.get(node)
        if stream is None:
            return
        stream.answers.append(answer)
        if answer.questions:
            self._thread.call(lambda: self._write_soon(stream))

    # -- in the thread of links

    async def _listen(self) -> None:
        where = await addresses.to_listen_on(self._hosts)
        server, port = await self._bound(where)
        self.state = f"listens on port {port} of {', '.join(where)}"
        log.info("the lead of a run %s", self.state)
        try:
            await server.wait_for_termination()
        finally:
            self.state = "does not listen"
            await server.stop(None)

    async def _bound(self, where: Sequence[str]) -> tuple[Any, int]:
        for port in self._ports:
            server = self._made()
            with contextlib.suppress(RuntimeError):
                for address in where:
                    place = addresses.Place(address, port)
                    server.add_secure_port(str(place), self._credentials)
                await server.start()
                return server, port
            await server.stop(None)
        self.state = f"cannot listen: its ports {', '.join(map(str, self._ports))} are taken"
        raise OSError(self.state)

    def _made(self) -> Any:
        # Journals need descriptors too.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = (
            *limits.KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_receive_message_length", limits.MOST_REPORT_BYTES),
            ("grpc.max_send_message_length", limits.MOST_ANSWER_BYTES),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 1),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_WITHIN_MS),
            ("grpc.max_allowed_incoming_connections", min(_MOST_NODES + 512, files // 2)),
            # Otherwise a second server could listen on the same port.
            ("grpc.so_reuseport", 0),
        )
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MOST_NODES + 512)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        methods = {limits.METHOD: handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(limits.SERVICE, methods),)
        )
        return server

    async def _serve(self, _requests: Any, context: Any) -> None:
        """One stream, from its greeting to its end."""
        stream: _Stream | None = None
        try:
            try:
                greeting = await asyncio.wait_for(self._read(context), _GREETING_WITHIN_S)
            except asyncio.TimeoutError:
                raise _Refused(
                    "silent", grpc.StatusCode.DEADLINE_EXCEEDED, "nothing came"
                ) from None
            if greeting is None:
                return
            stream = self._admitted(greeting, context)
            await self._acknowledge(stream, context, greeting)
            await self._take_reports(stream, context)
        except _Refused as refused:
            self.refused[refused.why] += 1
            await context.abort(refused.code, str(refused))
        finally:
            if stream is not None and stream.context is context:
                stream.context = None
                stream.heard = Heard(
                    stream.heard.address, False, time.time_ns(), stream.heard.last_ns
                )

    async def _take_reports(self, stream: _Stream, context: Any) -> None:
        second, taken = 0, 0
        while (report := await self._read(context)) is not None:
            if (now := int(time.monotonic())) != second:
                second, taken = now, 0
            taken += 1
            if taken > _MOST_REPORTS_A_SECOND:
                # It is not read from meanwhile, so that nothing of it waits here.
                await asyncio.sleep(1.0)
            self._take(stream, report)
            await self._acknowledge(stream, context, report)

    async def _read(self, context: Any) -> Any | None:
        """The next report; None: the stream is over."""
        data = await context.read()
        if data is grpc.aio.EOF:
            return None
        try:
            report = Report.FromString(data)
        except DecodeError:
            raise _Refused(
                "unreadable", grpc.StatusCode.INVALID_ARGUMENT, "a report that cannot be read"
            ) from None
        report.received_ns = time.time_ns()
        return report

    def _admitted(self, greeting: Any, context: Any) -> _Stream:
        """The node's stream, if nothing speaks against it."""
        node = greeting.node
        if greeting.number or not 0 < len(node) <= limits.MOST_NODE_LETTERS:
            raise _Refused(
                "no greeting", grpc.StatusCode.INVALID_ARGUMENT, "the stream has no greeting"
            )
        stream = self._streams.get(node)
        if stream is not None and stream.agent != greeting.agent:
            if stream.context is not None and greeting.agent_began_ns <= stream.began_ns:
                raise _Refused(
                    "second agent",
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"a newer agent of a node {node!r} is connected (OTEL_DDP_NODE)",
                )
            stream = None
        if stream is None:
            self._make_room()
            old, stream = self._streams.get(node), _Stream(greeting)
            self._streams[node] = stream
            _end(old)
        else:
            _end(stream)
        stream.context, stream.served = context, asyncio.current_task()
        now = time.time_ns()
        stream.heard = Heard(_address(context.peer()), True, now, now)
        return stream

    def _make_room(self) -> None:
        if len(self._streams) < _MOST_NODES:
            return
        gone = [each for each in self._streams.values() if each.context is None]
        if not gone:
            raise _Refused(
                "too many nodes",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the lead takes {_MOST_NODES} nodes",
            )
        del self._streams[min(gone, key=lambda each: each.heard.last_ns).node]

    def _take(self, stream: _Stream, report: Any) -> None:
        if (report.node, report.agent) != (stream.node, stream.agent):
            raise _Refused(
                "other node", grpc.StatusCode.INVALID_ARGUMENT, "a report of another node"
            )
        heard = stream.heard
        stream.heard = Heard(heard.address, True, heard.since_ns, report.received_ns)
        if report.number <= stream.received:
            # It came before, or it is late behind a newer one.
            self.refused["repeated"] += 1
            return
        stream.received = report.number
        self._waiting.add(stream.node, report, report.ByteSize())

    async def _acknowledge(self, stream: _Stream, context: Any, report: Any) -> None:
        answer = stream.answers.popleft() if stream.answers else Answer()
        answer.report_sent_ns, answer.report_received_ns = report.sent_ns, report.received_ns
        await self._write(stream, context, answer)

    def _write_soon(self, stream: _Stream) -> None:
        async def write() -> None:
            # The stream may be over by then.
            with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                while stream.answers and stream.context is not None:
                    await self._write(stream, stream.context, stream.answers.popleft())

        writing = asyncio.ensure_future(write())
        # The loop itself holds no task.
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    async def _write(self, stream: _Stream, context: Any, answer: Any) -> None:
        answer.node, answer.agent = self._node, self._agent
        async with stream.writes:
            answer.received = stream.received
            answer.sent_ns = time.time_ns()
            await context.write(answer.SerializeToString())


def _end(stream: _Stream | None) -> None:
    if stream is not None and stream.context is not None and stream.served is not None:
        stream.served.cancel()


def _address(peer: str) -> str:
    """An address with its port, as gRPC names it."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")
