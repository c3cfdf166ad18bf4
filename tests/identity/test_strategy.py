"""Which ranks' series leave the node."""

from __future__ import annotations

import os
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from otel_ddp import Identity
from otel_ddp.errors import ConfigError
from otel_ddp.identity.identity import Choice


def rank(number: int | None, local: int | None = None) -> Identity:
    return Identity(run="a-run", global_rank=number, local_rank=local)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("all", [True] * 4), ("node", [True, False] * 2), ("main", [True, False, False, False])],
)
def test_two_nodes_of_two_ranks(strategy: str, expected: list[bool]) -> None:
    choice = Choice(strategy)

    assert expected == [choice.exports(rank(each, each % 2)) for each in range(4)]


def test_what_is_not_known_is_not_guessed() -> None:
    assert Choice("main").exports(rank(None, local=0)) is None
    assert Choice("node").exports(rank(0, local=None)) is None
    assert Choice("all").exports(rank(None)) is True


def test_a_function_is_asked_about_the_identity(place: Here) -> None:
    asked: list[Identity] = []

    with otel_ddp.init(lambda who: asked.append(who) or who.global_rank == 3, global_rank=3) as run:
        assert [run.identity] == asked

    told = place.only().identity
    assert (told["strategy"], told["exported"]) == ("custom", True)


@pytest.mark.parametrize("strategy", ["", "every", "0.1", 0.1, True, [0]])
def test_what_is_no_strategy_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="strategy must be"):
        Choice(strategy)


def test_the_argument_wins_over_the_variable(place: Here) -> None:
    os.environ["OTEL_DDP_STRATEGY"] = "node"

    otel_ddp.instrument(None, strategy="main").finish()

    assert place.only().identity["strategy"] == "main"


def test_an_unknown_rank_gives_one_warning_and_is_not_guessed(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    # A process of several, of which only the local rank is known.
    with otel_ddp.init("main", local_rank=0, world_size=4) as run:
        for step in range(3):
            run.log({"loss": 1.0}, step=step)

    (said,) = [each.getMessage() for each in caplog.records]
    assert "strategy 'main' needs the rank of this process" in said
    assert "Set OTEL_DDP_RANK" in said
    assert not place.only().identity["exported"]
    assert len(place.only().calls) == 3
