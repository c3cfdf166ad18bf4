"""What NCCL's RAS says of a job that stands, by a stand-in that answers as NVIDIA documents it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from golden import Golden
from node import until
from otel_ddp.agent.judge.answers import Ras, remark

S = 10**9
HOST, OTHER = "172.16.64.245", "172.16.64.246"


def member(rank: int, host: str = HOST, **status: bool) -> dict[str, Any]:
    """What is read of a rank, of all that NVIDIA documents."""
    return {"rank": rank, "host": host, "pid": 1524344 + rank, "status": status}


def lost(rank: int, host: str = HOST, *, dead: bool = False) -> dict[str, Any]:
    return member(rank, host, unresponsive=not dead, considered_dead=dead)


def document(
    ranks: list[dict[str, Any]], missing: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    missing = missing or []
    size = len(ranks) + len(missing)
    return {"communicators": [{"size": size, "ranks": ranks, "missing_ranks": missing}]}


# -- what it means

DOCUMENTS: dict[str, dict[str, Any]] = {
    "one does not respond": document([member(0), member(1)], [lost(2, OTHER)]),
    "one is taken for dead": document([member(0), member(1)], [lost(2, OTHER, dead=True)]),
    "nothing": document([member(0), member(1), member(2, OTHER)]),
    "a communicator of some ranks, which have other numbers": document(
        [member(0)], [lost(2, OTHER)]
    ),
    "another job on this host": document([member(7), member(8)], [lost(9)]),
    "odd contents": {"communicators": [{"ranks": [{"pid": 1524344}, 7], "missing_ranks": "x"}, 8]},
    "very many": document([member(0)], [lost(rank) for rank in range(1, 100)]),
}


@pytest.mark.parametrize("content", DOCUMENTS.values(), ids=[*DOCUMENTS])
def test_ranks_that_are_missing_are_named(content: dict[str, Any], golden: Golden) -> None:
    golden.check(remark(content, {1524344}, world_size=3))


# -- asking


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Where NCCL would listen."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(10.0)
        yield found


def ras_at(listening: socket.socket) -> Ras:
    return Ras({"NCCL_RAS_ADDR": f"127.0.0.1:{listening.getsockname()[1]}"})


def asked(listening: socket.socket) -> socket.socket:
    """The connection of the question that has been sent."""
    client, _ = listening.accept()
    assert client.recv(100) == b"set format json\nverbose status\n"
    return client


def test_an_answer_that_comes_in_parts_is_waited_for_and_told_once(
    listening: socket.socket,
) -> None:
    answer = b"OK\n" + json.dumps(document([member(0)], [lost(1)]), indent=2).encode()
    ras = ras_at(listening)

    assert ras.poll(0) == {}
    with asked(listening) as client:
        client.sendall(answer[:100])
        assert ras.poll(S) == {}
        client.sendall(answer[100:])
    found = until(lambda: ras.poll(2 * S), "the answer")
    assert found["communicators"][0]["missing_ranks"] == [lost(1)]
    assert ras.poll(3 * S) == {}


def test_nobody_who_listens_is_no_failure_and_not_asked_again(listening: socket.socket) -> None:
    ras, address = ras_at(listening), listening.getsockname()
    listening.close()

    assert ras.poll(0) == {}
    with socket.create_server(address) as later:
        later.setblocking(False)
        assert ras.poll(S) == {}
        with pytest.raises(BlockingIOError):
            later.accept()
