"""The extremes of what rank 0 logs, the best of them as series, and what a restart leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from fed import IDENTITY, Fed
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.logged_values import MOST_NAMES, Summaries, summaries_of
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place
from otel_ddp.journal.survey import Survey, last_of_agent, leave
from otel_ddp.vocabulary import catalog


class Node:
    """What one agent knows, and where the journals lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = Place(folder)
        self.new_agent()

    def new_agent(self, *read: Fed) -> None:
        """Another agent takes the place of the first, and reads these."""
        self.ledger = Ledger()
        leave(self.place, last_of_agent(self.place))
        self.summaries: Summaries = summaries_of(last_of_agent(self.place).processes)
        for each in read:
            each.read_by(self.ledger, self.summaries)

    def attempt(self, **more: Any) -> Fed:
        made = Fed(self.folder, {**IDENTITY, **more})
        made.read_by(self.ledger, self.summaries)
        return made

    def write(self, *read: Fed) -> None:
        """The agent's document, with what it knows of these."""
        known = Survey(processes=[each.process.describe_in_full() for each in read])
        self.place.agent_file.write_text(json.dumps(known.to_json()))

    def best(self) -> dict[str, tuple[float, float | None]]:
        """Name -> the best value and its step."""
        families = dict(self.ledger.families())
        values, steps = (
            {dict(series.labels)["name"]: series.value for series in families.get(metric, [])}
            for metric in (catalog.TRAINING_SCALAR_BEST, catalog.TRAINING_SCALAR_BEST_STEP)
        )
        return {name: (value, steps.get(name)) for name, value in values.items()}


def log(rank: Fed, name: str, value: float, step: int, at_ns: int = 0, split: str = "val") -> None:
    rank.log({name: value}, step, at_ns or None, split)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    yield Node(tmp_path)
    Fed.close_all()


def test_what_is_not_finite_is_no_best(node: Node) -> None:
    rank = node.attempt()
    for step, value in enumerate([nan, -inf, 5.0, nan, inf, -inf]):
        log(rank, "loss", value, step)
        log(rank, "accuracy", value, step)
    # What comes twice or late changes nothing.
    log(rank, "loss", 5.0, 7)
    log(rank, "loss", 6.0, 1, time.time_ns() - 10**9)

    rank.poll()

    assert node.best() == {"loss": (5.0, 2.0), "accuracy": (5.0, 2.0)}


def test_the_best_value_outlives_the_attempt_that_logged_it(node: Node) -> None:
    first = node.attempt()
    log(first, "loss", 1.0, 10)
    first.poll()

    second = node.attempt(restarts=1)
    log(second, "loss", 2.0, 8)
    second.poll()
    node.write(second)
    # The first journal is gone, and so is the agent that knew it.
    node.new_agent(second)
    second.poll()

    assert node.best() == {"loss": (1.0, 10.0)}


def test_a_direction_that_the_user_says_takes_the_place_of_the_guessed_one(node: Node) -> None:
    rank = node.attempt()
    for step, value in enumerate([2.0, 1.0, 3.0]):
        log(rank, "wer", value, step)
        log(rank, "speed", value, step)
    rank.poll()
    before = node.best()

    rank.writer.document(layout.FACTS, {"best": {"wer": "none", "speed": "max"}})
    rank.poll()

    assert before == {"wer": (1.0, 1.0)}
    assert node.best() == {"speed": (3.0, 2.0)}


def test_the_number_of_names_is_bounded(node: Node) -> None:
    rank = node.attempt()
    for number in range(MOST_NAMES + 5):
        log(rank, f"loss_of_task{number}", 1.0, 1)

    rank.poll()

    assert len(node.best()) == MOST_NAMES


def test_people_see_last_lowest_and_highest_with_step_and_time(node: Node) -> None:
    rank = node.attempt()
    at_ns = time.time_ns()
    for step, loss in enumerate([2.0, 1.0, 3.0, 2.5]):
        log(rank, "loss", loss, step, at_ns + step)

    before = rank.process.summary()
    rank.poll()

    assert before == []
    assert rank.process.summary() == [
        {
            "name": "loss",
            "split": "val",
            "direction": "min",
            "last": {"value": 2.5, "step": 3, "time_ns": at_ns + 3},
            "min": {"value": 1.0, "step": 1, "time_ns": at_ns + 1},
            "max": {"value": 3.0, "step": 2, "time_ns": at_ns + 2},
        }
    ]
