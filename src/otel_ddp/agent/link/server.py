"""The lead's end of the links of one run: a server that the agents of the other nodes connect to.

It listens in the thread of links. A peer without the run's secret gets no further than its
handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from otel_ddp.agent.link import addresses, credentials, limits
from otel_ddp.agent.link.acceptor import Acceptor
from otel_ddp.agent.link.link_thread import LinkThread, unbroken
from otel_ddp.agent.link.streams import Streams

log = logging.getLogger("otel_ddp.agent")

_MOST_NODES = 2048
# A connection, and both ends of the one that passes it on.
_FILES_EACH = 3
_LATE_EVERY_S = 0.5


class LinkServer:
    """One a run that this agent leads. `start` and `stop` return at once."""

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
        self._credentials = credentials.of_lead(secret)
        self._hosts, self.ports, self._most_nodes = hosts, ports, most_nodes
        self.streams = Streams(node, most_nodes, thread.call, clock)
        self.take = self.streams.take
        self.answer = self.streams.answer
        self.state = "does not listen yet"
        """What `status` says of it."""

    @property
    def dropped(self) -> int:
        """How many reports were dropped because `take` was not called in time."""
        return self.streams.dropped

    @property
    def refused(self) -> Mapping[str, int]:
        """How many streams and reports were not taken, by reason."""
        return self.streams.refused.copy()

    def start(self) -> None:
        self._thread.add(self._listen)

    def stop(self) -> None:
        """Listen no more, and end all streams."""
        self._thread.discard(self._listen)

    async def _listen(self) -> None:
        """Runs in the thread of links; it is called again some seconds after it returned."""
        where = await addresses.to_listen_on(self._hosts)
        server = self._made()
        acceptor = Acceptor(partial(server.add_secure_port, server_credentials=self._credentials))
        handler = grpc.stream_stream_rpc_method_handler(partial(self._serve, acceptor))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(limits.SERVICE, {limits.METHOD: handler}),)
        )
        try:
            await server.start()
            port = acceptor.listen(where, self.ports)
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
                    acceptor.close_late()
            finally:
                self.state = "does not listen"
        finally:
            acceptor.stop()
            await unbroken(_closed(server, acceptor))

    def _made(self) -> Any:
        # Journals need descriptors too.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = (
            *limits.CONNECTION,
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_receive_message_length", limits.MOST_REPORT_BYTES + limits.STAMP_BYTES),
            ("grpc.max_send_message_length", limits.MOST_ANSWER_BYTES + limits.STAMP_BYTES),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 1),
            (
                "grpc.max_allowed_incoming_connections",
                min(2 * self._most_nodes, files // (2 * _FILES_EACH)),
            ),
        )
        return grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * self._most_nodes)

    async def _serve(self, acceptor: Acceptor, _requests: Any, context: Any) -> None:
        acceptor.proved(context.peer())
        # gRPC cancels it where the stream or the server ends, and would log a traceback for each.
        with contextlib.suppress(asyncio.CancelledError):
            await self.streams.serve(context)


async def _closed(server: Any, acceptor: Acceptor) -> None:
    await server.stop(None)
    await acceptor.close()
