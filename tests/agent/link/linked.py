"""A lead and its followers in one process, over real sockets."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tools.stack.server import free_port

import node
from otel_ddp.agent.link.channel import LinkThread
from otel_ddp.agent.link.client import LinkClient
from otel_ddp.agent.link.server import LinkServer

SECRET = bytes(range(32))
WITHIN_S = 60.0


def until(holds: Callable[[], Any]) -> Any:
    """What *holds* returns once it is true: links are made and broken in another thread."""
    return node.until(holds, "a link")


class Relay:
    """A network between two ends: a port whose connections are led to another one."""

    def __init__(self, to: int) -> None:
        self._to, self._moves = to, True
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def freeze(self) -> None:
        """Keep all connections, and let nothing through."""
        self._moves = False

    def stop(self) -> None:
        self._stops.set()
        self._thread.join()

    def _run(self) -> None:
        with self._server:
            while not self._stops.is_set():
                watched = [*self._pairs] if self._moves else []
                ready, _, _ = select.select([self._server, *watched], [], [], 0.02)
                if self._server in ready:
                    self._accept()
                for each in ready:
                    if each in self._pairs:
                        self._move(each)
            self._close(*self._pairs)

    def _accept(self) -> None:
        here, _ = self._server.accept()
        try:
            there = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            here.close()
            return
        self._pairs |= {here: there, there: here}

    def _move(self, here: socket.socket) -> None:
        try:
            data = here.recv(65536)
            self._pairs[here].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._close(here, self._pairs[here])

    def _close(self, *ends: socket.socket) -> None:
        for each in ends:
            self._pairs.pop(each, None)
            each.close()


class Links:
    """Makes both ends, each ended with the test."""

    def __init__(self, thread: LinkThread, stack: ExitStack) -> None:
        self._thread, self._stack = thread, stack
        self.port = free_port()

    def lead(self, secret: bytes = SECRET, **more: Any) -> LinkServer:
        known = {"node": "node-0", "hosts": ["127.0.0.1"], "ports": [self.port]}
        lead = LinkServer(self._thread, secret, **(known | more))
        lead.start()
        self._stack.callback(lead.stop)
        return lead

    def relay(self) -> Relay:
        """Leads to where the lead listens."""
        relay = Relay(self.port)
        self._stack.callback(relay.stop)
        return relay

    def follower(self, **more: Any) -> LinkClient:
        known = {"node": "node-1", "hosts": ["127.0.0.1"], "ports": [self.port]}
        follower = LinkClient(self._thread, SECRET, **(known | more))
        follower.start()
        self._stack.callback(follower.stop)
        return follower


@contextmanager
def links() -> Iterator[Links]:
    thread = LinkThread()
    thread.start()
    with ExitStack() as stack:
        stack.callback(thread.stop)
        yield Links(thread, stack)
