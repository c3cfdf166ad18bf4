"""Many clients of the endpoint, and slow ones: those who ask are answered."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.scrape.serving import serving
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.scrape import server as servers
from otel_ddp.agent.scrape.endpoint import Endpoint
from otel_ddp.history.page.app import App

PAGE = App(Path("/nowhere"))
# The kernel keeps no more.
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as endpoint:
        yield endpoint


def connect(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)


def scrape(endpoint: Endpoint) -> int:
    with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
        return int(answer.status)


def drip(clients: list[socket.socket]) -> None:
    for each in clients:
        # Most have been cut off.
        with contextlib.suppress(OSError):
            each.send(b"G")


def test_many_clients_at_once_find_room_before_they_are_accepted() -> None:
    endpoint = Endpoint(Ledger(), "127.0.0.1", 0, PAGE)
    try:
        # Nothing accepts yet. A client without room would be silent until its time is over.
        with contextlib.ExitStack() as scrapers:
            for _ in range(min(400, int(SOMAXCONN.read_text()))):
                scrapers.enter_context(connect(endpoint))
    finally:
        endpoint.start()
        endpoint.stop()


def test_idle_and_dripping_clients_stop_no_scrape(endpoint: Endpoint) -> None:
    with contextlib.ExitStack() as clients:
        idle, dripping = (
            [clients.enter_context(connect(endpoint)) for _ in range(80)] for _ in "ab"
        )
        answered = []
        for _ in range(8):
            drip(dripping)
            answered.append(scrape(endpoint))

        # Those that are awaited longest have made room: the endpoint is as bounded as ever.
        assert idle[0].recv(1) == b""

    assert answered == [200] * 8


def test_clients_for_whom_there_is_no_thread_are_answered_one_after_the_other(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(servers, "_MOST_CLIENTS", 2)
    monkeypatch.setattr("socketserver.threading.Thread", Short)

    assert [scrape(endpoint) for _ in range(4)] == [200] * 4
