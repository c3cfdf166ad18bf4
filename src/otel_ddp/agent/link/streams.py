"""What other nodes' agents say to the lead of a run, one stream a node: their reports, our answers.

All bounds are on what others can make it keep. What is refused is counted, and ends its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp.agent.link import limits
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.link_thread import within
from otel_ddp.agent.link.queues import WaitingReports

_MOST_WAITING_BYTES = 32 << 20
_MOST_ANSWERS = 16
_MOST_REPORTS_A_SECOND = 256
_GREETING_WITHIN_S = 5.0
_CODES = grpc.StatusCode


class _Refused(Exception):
    def __init__(self, why: str, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.why, self.code = why, code


class _Ended(Exception):
    """The node's agent has ended its stream."""


class _Stream:
    """One node, as long as its agent is the same."""

    def __init__(self, greeting: Any) -> None:
        self.agent: int = greeting.agent
        self.began_ns: int = greeting.agent_began_ns
        self.answers: deque[Any] = deque(maxlen=_MOST_ANSWERS)
        """Those that are written at once."""
        self.judged = Answer()
        """How the run was judged last, until it is told."""
        # Of those that are gone, the one that was heard first makes room.
        self.heard_ns = 0
        # Of the connection that it has now, if any.
        self.context: Any = None
        self.writes = asyncio.Lock()


class Streams:
    """`serve` runs in the thread of links, all else in the agent's loop."""

    def __init__(
        self,
        node: str,
        most_nodes: int,
        call: Callable[[Callable[[], None]], None],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """*node*: the lead's, and its *clock*; *call*: calls a function in the thread of links."""
        self._node, self._most_nodes, self._call = node, most_nodes, call
        self._clock = clock
        self._agent = random.getrandbits(64)
        self._waiting = WaitingReports(_MOST_WAITING_BYTES)
        self._streams: dict[str, _Stream] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self.refused: Counter[str] = Counter()
        """How many streams and reports were not taken, by reason."""

    def take(self) -> list[tuple[str, Any]]:
        """The reports since the last call, each with its node, as they came."""
        return self._waiting.take()

    @property
    def dropped(self) -> int:
        """How many reports were dropped because `take` was not called in time."""
        return self._waiting.dropped

    def answer(self, node: str, answer: Any) -> None:
        """Send it with the answer to the node's next report, unless there is a newer one by then;
        at once if there are questions.

        What is too large goes without how the run is judged.
        """
        stream = self._streams.get(node)
        if stream is None:
            return
        if answer.ByteSize() > limits.MOST_ANSWER_BYTES:
            # It would end the stream.
            self.refused["large answer"] += 1
            answer.ClearField("judged")
            if not 0 < answer.ByteSize() <= limits.MOST_ANSWER_BYTES:
                return
        if not (answer.questions or answer.lacking):
            stream.judged = answer
            return
        if answer.judged:
            stream.judged = Answer()
        stream.answers.append(answer)
        self._call(lambda: self._write_soon(stream))

    # -- in the thread of links

    async def serve(self, context: Any) -> None:
        """One stream, from its greeting to its end."""
        stream: _Stream | None = None
        try:
            try:
                greeting, _ = await within(_GREETING_WITHIN_S, self._read(context))
            except asyncio.TimeoutError:
                raise _Refused("silent", _CODES.DEADLINE_EXCEEDED, "no report came") from None
            stream = self._admitted(greeting, context)
            await self._acknowledge(stream, context, greeting)
            await self._take_reports(stream, context, greeting)
        except _Ended:
            return
        except _Refused as refused:
            self.refused[refused.why] += 1
            await context.abort(refused.code, str(refused))
        finally:
            if stream is not None and stream.context is context:
                stream.context = None

    async def _take_reports(self, stream: _Stream, context: Any, greeting: Any) -> None:
        second, taken = 0, 0
        while True:
            report, size = await self._read(context)
            if (now := int(time.monotonic())) != second:
                second, taken = now, 0
            taken += 1
            if taken > _MOST_REPORTS_A_SECOND:
                # It is not read from meanwhile, so that nothing of it waits here.
                await asyncio.sleep(1.0)
            if (report.node, report.agent) != (greeting.node, greeting.agent):
                raise _Refused("other node", _CODES.INVALID_ARGUMENT, "a report of another node")
            self._take(stream, report, size)
            await self._acknowledge(stream, context, report)

    def _take(self, stream: _Stream, report: Any, size: int) -> None:
        stream.heard_ns = report.received_ns
        self._waiting.add(report.node, report, size)

    def _admitted(self, greeting: Any, context: Any) -> _Stream:
        """The node's stream, if nothing speaks against it."""
        node = greeting.node
        if not (0 < len(node) <= limits.MOST_NODE_LETTERS and node.isprintable()):
            raise _Refused("no name", _CODES.INVALID_ARGUMENT, "this is no name of a node")
        old = self._streams.get(node)
        stream = old if old is not None and old.agent == greeting.agent else None
        if stream is None:
            if old is None:
                self._make_room()
            elif old.context is not None and greeting.agent_began_ns <= old.began_ns:
                text = f"a newer agent of a node {node!r} is connected (OTEL_DDP_NODE)"
                raise _Refused("second agent", _CODES.ALREADY_EXISTS, text)
            stream = self._streams[node] = _Stream(greeting)
        if old is not None and old.context is not None:
            # Dead, as far as the node's agent knows, or of an agent that has ended.
            self._begin(_replaced(old.context, old.writes))
        stream.context = context
        stream.heard_ns = greeting.received_ns
        return stream

    def _make_room(self) -> None:
        if len(self._streams) < self._most_nodes:
            return
        gone = [node for node, each in self._streams.items() if each.context is None]
        if not gone:
            text = f"the lead takes {self._most_nodes} nodes"
            raise _Refused("too many nodes", _CODES.RESOURCE_EXHAUSTED, text)
        del self._streams[min(gone, key=lambda node: self._streams[node].heard_ns)]

    async def _acknowledge(self, stream: _Stream, context: Any, report: Any) -> None:
        if stream.answers:
            answer = stream.answers.popleft()
        else:
            answer, stream.judged = stream.judged, Answer()
        answer.report_sent_ns, answer.report_received_ns = report.sent_ns, report.received_ns
        await self._write(stream, context, answer)

    def _write_soon(self, stream: _Stream) -> None:
        async def write() -> None:
            # The stream may be over by then.
            with contextlib.suppress(grpc.aio.UsageError, asyncio.InvalidStateError):
                while stream.answers and stream.context is not None:
                    await self._write(stream, stream.context, stream.answers.popleft())

        self._begin(write())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        # The loop itself holds no task.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, stream: _Stream, context: Any, answer: Any) -> None:
        answer.node, answer.agent = self._node, self._agent
        async with stream.writes:
            answer.sent_ns = self._clock()
            await context.write(answer.SerializeToString())

    async def _read(self, context: Any) -> tuple[Any, int]:
        """The next report, and its size."""
        data = await context.read()
        if data is grpc.aio.EOF:
            raise _Ended
        try:
            report = Report.FromString(data)
        except DecodeError:
            text = "a report that cannot be read"
            raise _Refused("unreadable", _CODES.INVALID_ARGUMENT, text) from None
        report.received_ns = self._clock()
        return report, len(data)


async def _replaced(context: Any, writes: asyncio.Lock) -> None:
    # It raises where it has succeeded; the stream may be over by then.
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, asyncio.InvalidStateError):
        # gRPC refuses to end a stream in the middle of a message.
        async with writes:
            text = "a newer stream of this node has replaced it"
            await context.abort(_CODES.ALREADY_EXISTS, text)
