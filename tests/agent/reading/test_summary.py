"""The extremes of what rank 0 logs, the best of them as series, and what a restart leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from make import WrittenRank
from otel_ddp.agent.ledger import Ledger, Series
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.agent.reading.logged_values import MOST_NAMES, Summaries
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.values import described
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.vocabulary import catalog


class Attempt:
    """The journal of one process, which a node's agent reads."""

    def __init__(self, node: Node, identity: dict[str, Any]) -> None:
        self._node = node
        self.rank = WrittenRank(node.folder, **identity)
        self.writer = self.rank.writer
        self.read_by_another_agent()

    def read_by_another_agent(self) -> None:
        self.reader = JournalReader(self.writer.path)
        self._node.opened.append(self.reader)
        node = self._node
        self.journal = JournalFeed(
            self.reader, node.ledger, lambda who: "h", summaries=node.summaries
        )

    def log(self, name: str, value: float, step: int, at_ns: int = 0, split: str = "val") -> None:
        self.rank.log({name: value}, step, at_ns or None, split)

    def poll(self) -> None:
        now_ns = time.time_ns()
        self.journal.poll(now_ns, alive=True)
        self.journal.update_series(now_ns, is_newest=True)


class Node:
    """What one agent knows, and where the journals lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[JournalReader] = []
        self.written: list[JournalWriter] = []
        self.new_agent()

    def new_agent(self) -> None:
        self.ledger = Ledger()
        self.summaries: Summaries = {}

    def attempt(self, **more: Any) -> Attempt:
        made = Attempt(self, more)
        self.written.append(made.writer)
        return made

    def best(self) -> dict[str, tuple[float, float | None]]:
        """Name -> the best value and its step."""
        values = self._found(catalog.TRAINING_SCALAR_BEST)
        steps = self._found(catalog.TRAINING_SCALAR_BEST_STEP)
        return {name: (value, steps.get(name)) for name, value in values.items()}

    def _found(self, metric: catalog.Metric) -> dict[str, Any]:
        rows: list[Series] = next(
            (rows for each, rows in self.ledger.families() if each is metric), []
        )
        return {dict(series.labels)["name"]: series.value for series in rows}

    def close(self) -> None:
        for each in (*self.opened, *self.written):
            each.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_the_best_value_has_the_step_at_which_it_was_logged(node: Node) -> None:
    rank = node.attempt()
    for step, (loss, accuracy) in enumerate([(3.0, 0.1), (1.0, 0.7), (2.0, 0.5)]):
        rank.log("loss", loss, step)
        rank.log("accuracy", accuracy, step)
        rank.log("lr", 0.1, step)

    rank.poll()

    assert node.best() == {"loss": (1.0, 1.0), "accuracy": (0.7, 1.0)}


def test_each_split_has_a_best_of_its_own_and_says_its_direction(node: Node) -> None:
    rank = node.attempt()
    rank.log("loss", 1.0, 1, split="train")
    rank.log("loss", 2.0, 2, split="val")

    rank.poll()

    (rows,) = (
        rows for each, rows in node.ledger.families() if each is catalog.TRAINING_SCALAR_BEST
    )
    assert [(series.labels[6:], series.value) for series in rows] == [
        ((("name", "loss"), ("split", "train"), ("direction", "min")), 1.0),
        ((("name", "loss"), ("split", "val"), ("direction", "min")), 2.0),
    ]


def test_what_is_not_finite_is_no_best(node: Node) -> None:
    rank = node.attempt()
    for step, value in enumerate([nan, -inf, 5.0, nan, inf, -inf]):
        rank.log("loss", value, step)
        rank.log("accuracy", value, step)

    rank.poll()

    assert node.best() == {"loss": (5.0, 2.0), "accuracy": (5.0, 2.0)}


def test_a_value_that_comes_late_or_twice_changes_nothing(node: Node) -> None:
    rank = node.attempt()
    at_ns = time.time_ns()
    rank.log("loss", 1.0, 5, at_ns)
    rank.log("loss", 1.0, 5, at_ns)
    rank.log("loss", 1.0, 7, at_ns + 10**9)
    rank.log("loss", 2.0, 3, at_ns - 10**9)

    rank.poll()

    assert node.best() == {"loss": (1.0, 5.0)}


def test_only_an_exported_rank_0_has_best_values(node: Node) -> None:
    for more in ({"global_rank": 1}, {"exported": False}):
        rank = node.attempt(**more)
        rank.log("loss", 1.0, 1)
        rank.poll()

    assert node.best() == {}
    assert list(node.folder.glob(f"*{layout.SUMMARY_SUFFIX}")) == []


def test_the_best_value_outlives_the_agent_that_has_read_it(node: Node) -> None:
    rank = node.attempt()
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        rank.log("loss", loss, step)
    rank.poll()
    rank.reader.commit(*rank.reader.bookmark())

    node.new_agent()
    rank.read_by_another_agent()
    rank.log("loss", 1.5, 3)
    rank.poll()

    assert node.best() == {"loss": (1.0, 1.0)}


def test_the_best_value_outlives_the_attempt_that_logged_it(node: Node) -> None:
    first = node.attempt()
    first.log("loss", 1.0, 10)
    first.poll()

    second = node.attempt(restarts=1)
    second.log("loss", 2.0, 8)
    second.poll()
    # The first journal is gone, and so is the agent that knew it.
    node.new_agent()
    second.read_by_another_agent()
    second.poll()

    assert node.best() == {"loss": (1.0, 10.0)}


def test_a_damaged_summary_is_none(node: Node) -> None:
    rank = node.attempt()
    beside = rank.writer.path.with_suffix(layout.SUMMARY_SUFFIX)
    rank.log("loss", 3.0, 1)

    huge = b"1" + b"0" * 400
    for content in (
        *(b"", b"{", b"{}", b"[1]", b"\xff"),
        b'[["loss", "val", 1.0, 1, 1, "x", 1, 1]]',
        # No float can be as large.
        b'[["loss", "train", %b, 1, 1, 1.0, 1, 1]]' % huge,
        b'[["loss", "train", 1.0, %b, 1, 1.0, %b, 1]]' % (huge, huge),
        # No label may be like that.
        b'[["loss\\ud800", "val", 1.0, 1, 1, 1.0, 1, 1]]',
        b'[["loss\\u001b[31m", "val", 1.0, 1, 1, 1.0, 1, 1]]',
    ):
        beside.write_bytes(content)
        node.new_agent()
        rank.read_by_another_agent()
        rank.poll()

        assert node.best() == {"loss": (3.0, 1.0)}


def test_a_direction_that_the_user_says_takes_the_place_of_the_guessed_one(node: Node) -> None:
    rank = node.attempt()
    for step, value in enumerate([2.0, 1.0, 3.0]):
        rank.log("wer", value, step)
        rank.log("speed", value, step)
    rank.poll()
    before = node.best()

    rank.writer.document(layout.FACTS, {"best": {"wer": "none", "speed": "max"}})
    rank.poll()

    assert before == {"wer": (1.0, 1.0)}
    assert node.best() == {"speed": (3.0, 2.0)}


def test_the_number_of_names_is_bounded(node: Node) -> None:
    rank = node.attempt()
    for number in range(MOST_NAMES + 5):
        rank.log(f"loss_of_task{number}", 1.0, 1)

    rank.poll()

    assert len(node.best()) == MOST_NAMES


def test_people_see_last_lowest_and_highest_with_step_and_time(node: Node) -> None:
    rank = node.attempt()
    at_ns = time.time_ns()
    for step, loss in enumerate([2.0, 1.0, 3.0, 2.5]):
        rank.log("loss", loss, step, at_ns + step)

    before = described(rank.reader)
    rank.poll()

    assert before == []
    assert described(rank.reader) == [
        {
            "name": "loss",
            "split": "val",
            "direction": "min",
            "last": {"value": 2.5, "step": 3, "time_ns": at_ns + 3},
            "min": {"value": 1.0, "step": 1, "time_ns": at_ns + 1},
            "max": {"value": 3.0, "step": 2, "time_ns": at_ns + 2},
        }
    ]


def test_a_rank_whose_series_are_dropped_begins_anew_and_leaves_no_file(tmp_path: Path) -> None:
    place = Place(tmp_path / "place")
    place.directory.mkdir(mode=0o700)
    ledger = Ledger()
    journals = Journals(place, ledger, "h")
    best = []
    for loss, linger_s in ((1.0, 1000.0), (2.0, 0.0), (3.0, 0.0)):
        rank = WrittenRank(place.directory)
        rank.log({"loss": loss}, 1, split="val")
        rank.close()
        journals.find()
        journals.poll()
        journals.update_series(time.time_ns())
        best += [
            series.value
            for each, rows in ledger.families()
            for series in rows
            if each is catalog.TRAINING_SCALAR_BEST
        ]
        journals.commit(journals.marks())
        done = journals.done()
        journals.close(done)
        journals.delete(done)
        journals.forget_ended(linger_s)

    assert best == [1.0, 1.0, 3.0]
    assert list(place.directory.glob(f"*{layout.SUMMARY_SUFFIX}*")) == []
