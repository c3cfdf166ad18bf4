"""The lead of a run has a copy of each node's history, whatever becomes of the link to it."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.history.batches import MS, RUN, S, batch
from otel_ddp.agent.history import incoming, outgoing, part_pb2
from otel_ddp.agent.history.histories import Histories
from otel_ddp.agent.history.incoming import Senseless, parse
from otel_ddp.agent.history.kept_run import Sample, State
from otel_ddp.history import run_file, tables
from otel_ddp.history.directory import file_name, find_run
from otel_ddp.history.reader import History
from otel_ddp.history.tables import SeriesKey
from otel_ddp.settings import MIB

VERDICT = {
    "kind": "straggler",
    "who": {"group": "g", "run": "r", "rank": "2", "node": "node-1"},
    "phase": "backward",
    "step": 7,
    "since_ns": 7 * S,
    "sentence": "rank 2 keeps the others waiting",
}
# Of a history, but for how far its node has read its journals.
TABLES = {
    "about": "key != 'copy'",
    "ranks": "true",
    "events": "true",
    "sums": "true",
    "steps": "true",
}


def state(node: str, ranks: tuple[int, ...], step: int) -> State:
    about = {"group": "g", "run": "r", "node": node, "began_ns": S, "config": {"lr": 0.1}}
    busy = SeriesKey("node", "hw.gpu.utilization", str(ranks[0]), (("gpu", "0"),))
    return State(
        about,
        {str(rank): {"rank": rank, "state": "running", "step": step} for rank in ranks},
        [VERDICT] if step > 7 else [],
        [Sample(RUN, busy, step * S, 0.5)],
    )


class Node:
    """One with its histories in a folder; the test is its agent's loop, and the link."""

    def __init__(self, folder: Path, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.kept = Histories(str(folder), 100 * MIB, name)

    def train(self, first: int, count: int) -> None:
        for rank in self.ranks:
            self.kept.feed(batch(first, count, journal=f"j{rank}", rank=str(rank)))
        self.kept.feed_states({RUN: state(self.name, self.ranks, first + count)})
        self.kept._write_all()

    def parts(self, lead: Node, start: str = "1", shift_ns: int = 0) -> list[bytes]:
        made = self.kept.parts_for_lead(RUN, lead.name, start, shift_ns)
        self.kept._write_all()
        return [*made, *self.kept.parts_for_lead(RUN, lead.name, start, shift_ns)]

    def tell(self, lead: Node, start: str = "1") -> None:
        """All that the lead does not know yet."""
        while parts := self.parts(lead, start):
            lead.take(self, parts)

    def take(self, other: Node, parts: list[bytes]) -> None:
        self.kept.take_parts(RUN, other.name, parts)
        self.kept._write_all()

    def rows(self, node: Node) -> dict[str, list[Any]]:
        """What the history of a node holds here."""
        path = self.kept.directory / file_name(*RUN, node.name)
        with contextlib.closing(sqlite3.connect(path)) as db:
            series = {
                id: more
                for id, *more in db.execute(
                    "SELECT id, kind, name, rank, labels, width FROM series"
                )
            }
            return {
                table: sorted(
                    (*(series[row[0]] if table in ("sums", "steps") else row[:1]), *row[1:])
                    for row in db.execute(f"SELECT * FROM {table} WHERE {which}")
                )
                for table, which in TABLES.items()
            }


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "_EVERY_S", 0.0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """The lead and a follower, each with a folder of its own."""
    nodes = Node(tmp_path / "a", "node-0", (0, 1)), Node(tmp_path / "b", "node-1", (2, 3))
    yield nodes
    for each in nodes:
        each.kept.stop()


def test_the_lead_has_what_the_node_has_and_reads_both_as_one_run(two: tuple[Node, Node]) -> None:
    lead, other = two
    lead.train(0, 20)
    # Before the link, and while it is there.
    other.train(0, 10)
    other.tell(lead)
    for first in range(10, 20, 5):
        other.train(first, 5)
        other.tell(lead)

    assert lead.rows(other) == other.rows(other)
    with find_run("r", lead.kept.directory) as run:
        assert run.nodes == ["node-0", "node-1"]
        assert [*run.ranks] == ["0", "1", "2", "3"]
        assert {rank: len(buckets) for rank, (_, _, buckets) in run.step_buckets.items()} == (
            dict.fromkeys("0123", 19)
        )
        # Both have written it.
        assert [each["sentence"] for each in run.verdicts()] == [VERDICT["sentence"]]


def test_what_comes_twice_or_is_lost_with_the_lead_counts_once(two: tuple[Node, Node]) -> None:
    lead, other = two
    other.train(0, 10)
    parts = other.parts(lead)
    for _ in range(2):
        lead.take(other, parts)
    other.train(10, 10)
    other.parts(lead)  # which the lead never gets: its agent ends
    other.train(15, 10)
    other.tell(lead, start="2")

    assert lead.rows(other) == other.rows(other)


def test_a_long_run_is_sent_in_pieces_and_as_wide_as_it_is_kept(
    two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "MOST_OF_SERIES", 100)
    monkeypatch.setattr(run_file, "_FEWEST_OF_SERIES", 100)
    monkeypatch.setattr(outgoing, "_MOST_ROWS", 60)
    lead, other = two
    other.train(0, 80)
    other.tell(lead)
    for first in range(80, 500, 70):
        other.train(first, 70)
        other.tell(lead)

    rows = lead.rows(other)
    assert rows == other.rows(other)
    assert {row[4] for row in rows["steps"]} == {8}


def test_times_are_the_leads(two: tuple[Node, Node]) -> None:
    lead, other = two
    other.train(0, 10)
    lead.take(other, other.parts(lead, shift_ns=-3 * S + MS))

    with History(lead.kept.directory / file_name(*RUN, "node-1")) as history:
        [busy] = history.series("node")
        assert [(each.first, each.last_ns) for each in history.sums(busy)] == [(7, 7 * S)]
        [loss, _] = history.series("value")
        assert [each.first for each in history.sums(loss)] == [*range(10)]
        assert history.events()[0].time_ns == 9 - 3 * S
        assert history.about["began_ns"] == -2 * S


def test_nodes_with_one_home_write_their_own_files_alone(tmp_path: Path) -> None:
    lead, other = Node(tmp_path, "node-0", (0, 1)), Node(tmp_path, "node-1", (2, 3))
    other.train(0, 10)
    before = other.rows(other)
    # The lead has written nothing yet: so it is told, and finds the file.
    parts = other.parts(lead)
    lead.take(other, parts)
    with History(lead.kept.directory / file_name(*RUN, "node-1")) as history:
        assert "copy" not in history.about
    assert lead.rows(other) == before
    lead.train(0, 10)

    assert other.parts(lead, start="2") == []

    for each in (lead, other):
        each.kept.stop()


def test_copies_leave_half_of_the_room_to_what_is_ours(
    two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, other = two
    other.train(0, 10)
    other.tell(lead)
    assert lead.kept._incoming is not None
    monkeypatch.setattr(lead.kept._incoming, "_most_bytes", 1000)
    other.train(10, 10)
    other.tell(lead)

    assert {row[6] for row in lead.rows(other)["steps"]} == {*range(1, 10)}


def test_only_so_many_nodes_are_copied(
    two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "MOST_NODES", 2)
    lead, other = two
    other.train(0, 2)
    [*parts] = other.parts(lead)
    for node in ("../../a", "b", "c"):
        lead.kept.take_parts(RUN, node, parts)
    lead.kept._write_all()

    # The names of files are ours, whatever a node calls itself.
    names = {file_name(*RUN, node) for node in ("../../a", "b")}
    assert {path.name for path in lead.kept.directory.glob("*.sqlite")} == names


GOOD = {"kind": "value", "name": "loss", "rank": "0", "width": 2}
SUMS = {"whole": [4, 4, 5, 1, 2, 1, 0], "fractions": [1.0, 1.0, 1.0, 1.0, float("nan")]}


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "other"},
        {"width": 0},
        {"name": "x" * 2000},
        {"labels": ["a"]},
        {"labels": ["a", "b"] * 100},
        {"whole": [4, 4]},
        {"whole": [5, 5, 5, 1, 2, 1, 0]},
        {"whole": [4, 9, 5, 1, 2, 1, 0]},
        {"whole": [4, 4, 2**62 + 1, 1, 2, 1, 0]},
        {"fractions": [float("nan"), 1.0, 1.0, 1.0, 1.0]},
        {"fractions": [1.0, 1.0, float("inf"), 1.0, 1.0]},
        {"fractions": []},
        {"kind": "steps"},
    ],
)
def test_buckets_without_sense_are_refused(bad: dict[str, Any]) -> None:
    def part(**buckets: Any) -> bytes:
        found = part_pb2.Part(version=tables.VERSION, buckets=[part_pb2.Buckets(**buckets)])
        return bytes(found.SerializeToString())

    [rows] = parse(part(**GOOD, **SUMS), RUN, "node-1").rows
    assert rows.rows == [[4, 4, 5, 1, 2, 1, 1.0, 1.0, 1.0, 1.0, 0, None]]
    with pytest.raises(Senseless):
        parse(part(**{**GOOD, **SUMS, **bad}), RUN, "node-1")


def test_garbage_is_refused_and_harms_no_copy(two: tuple[Node, Node]) -> None:
    lead, other = two
    other.train(0, 10)
    parts = other.parts(lead)
    lead.take(other, parts)
    before = lead.rows(other)
    chance = random.Random(7)
    refused = 0
    for _ in range(2000):
        content = bytearray(chance.choice(parts))
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        garbage = bytes(content[: chance.choice((len(content), chance.randrange(len(content))))])
        try:
            found = parse(garbage, RUN, "node-1")
        except Senseless:
            refused += 1
        else:
            assert (found.about["group"], found.about["run"]) == RUN
            assert found.about["node"] == "node-1"
    assert refused > 100

    lead.take(other, [b"\xff" * 100])
    assert lead.rows(other) == before
