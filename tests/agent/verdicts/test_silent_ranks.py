"""Finds ranks that record nothing, by the journals of those that do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fed import ReadRank
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.silent_ranks import SilentRanks

MINUTE_NS = 61 * 10**9
IDENTITY = {
    "world_size": 4,
    "local_world_size": 2,
    "run_settled": True,
    "rank_settled": True,
    "launched_by": "torchrun-1",
}


class Node:
    """Ranks that record, in journals of their own, and what is found of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.silent = SilentRanks()
        self.ranks: list[ReadRank] = []
        self.processes: list[Process] = []

    def rank(self, number: int, state: str = "running", **more: Any) -> Process:
        identity: dict[str, Any] = {**IDENTITY, "local_rank": number % 2, **more}
        made = ReadRank(self.folder, number, "h", **identity)
        made.state(state)
        made.poll()
        self.ranks.append(made)
        self.processes.append(made.process)
        return made.process

    def end(self, process: Process) -> None:
        """It has ended, and its journal was taken away."""
        self.processes.remove(process)

    def sentences(self, later_ns: int = MINUTE_NS) -> list[str]:
        self.silent.poll(self.processes, time.time_ns() + later_ns)
        assert all((each["run"], each["group"]) == ("r", "g") for each in self.silent.notes())
        return [each["sentence"] for each in self.silent.notes()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for each in node.ranks:
        each.close()


ONE = (
    "local rank 1 of node h records nothing: call instrument on every rank, not on rank 0 alone; "
    "strategy='main' exports rank 0 alone"
)


def test_a_rank_that_never_opened_a_run_is_missed_after_a_minute_and_logged_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.rank(0)

    assert node.sentences(later_ns=0) == []
    assert node.sentences() == [ONE]
    assert node.sentences() == [ONE]
    assert caplog.messages == [f"run r: {ONE}"]
    node.rank(1, state="starting")
    assert node.sentences() == []


SILENT: dict[str, dict[str, Any]] = {
    "not known how many there are": {"local_world_size": None},
    "the only one": {"local_world_size": 1},
    "not known which it is": {"local_rank": None},
    "a process of an unknown launch": {"launched_by": ""},
    "not settled": {"settled": False},
    "nothing done yet": {"state": "starting"},
    "ended": {"state": "finished"},
}


@pytest.mark.parametrize("case", SILENT)
def test_where_it_cannot_be_known_nothing_is_missed(case: str, node: Node) -> None:
    node.rank(0, **SILENT[case])

    assert node.sentences() == []


def test_a_rank_that_ended_long_ago_did_record(node: Node) -> None:
    node.rank(0)
    other = node.rank(1)
    assert node.sentences() == []

    node.end(other)

    assert node.sentences() == []


def test_a_rank_with_a_run_of_its_own_records(node: Node) -> None:
    node.rank(0)
    node.rank(1, run="another")

    assert node.sentences() == []


def test_an_agent_that_came_later_cannot_know(node: Node) -> None:
    node.rank(0)
    node.silent = SilentRanks(time.time_ns() + MINUTE_NS)

    assert node.sentences() == []
