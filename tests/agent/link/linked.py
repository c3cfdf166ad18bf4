"""A lead and its followers in one process, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from otel_ddp.agent.link.follower import Follower
from otel_ddp.agent.link.lead import Lead
from otel_ddp.agent.link.link_thread import LinkThread

SECRET = bytes(range(32))
_WITHIN_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(holds: Callable[[], Any]) -> Any:
    """What *holds* returns once it is true: links are made and broken in another thread."""
    paused = threading.Event()
    for _ in range(int(_WITHIN_S / 0.01)):
        if found := holds():
            return found
        paused.wait(0.01)
    raise AssertionError("it never came true")


class Links:
    """Makes both ends, each ended with the test."""

    def __init__(self, thread: LinkThread, stack: ExitStack) -> None:
        self._thread, self._stack = thread, stack
        self.port = free_port()

    def lead(self, secret: bytes = SECRET, **more: Any) -> Lead:
        known = {"node": "node-0", "hosts": ["127.0.0.1"], "ports": [self.port]}
        lead = Lead(self._thread, secret, **(known | more))
        lead.start()
        self._stack.callback(lead.stop)
        return lead

    def follower(self, secret: bytes = SECRET, **more: Any) -> Follower:
        known = {"node": "node-1", "began_ns": 1, "hosts": ["127.0.0.1"], "ports": [self.port]}
        follower = Follower(self._thread, secret, **(known | more))
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
