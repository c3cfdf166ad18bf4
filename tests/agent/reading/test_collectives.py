"""What a rank exchanges in a step, as series: means of the steps in which that was added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fed import Fed
from otel_ddp.diagnosis.steps import Collective
from otel_ddp.vocabulary import catalog

REDUCE, GATHER = ("world", "all_reduce"), ("shard", "all_gather")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Fed]:
    yield Fed(tmp_path)
    Fed.close_all()


def read(rank: Fed, *told: Mapping[Collective, list[int]] | None) -> tuple[dict[str, float], ...]:
    """Calls and bytes of a step, after steps that tell this."""
    rank.steps(*range(rank.rank.number + 1, rank.rank.number + 1 + len(told)))
    rank.process = rank.process.poll(0, True)
    steps = rank.process.new.steps
    steps[:] = [each._replace(collectives=c) for each, c in zip(steps, told, strict=True)]
    rank.exports.feed(rank.process)
    rank.exports.update_series(0, is_newest=True)
    return (
        rank.values(catalog.TRAINING_COLLECTIVE_STEP_CALLS),
        rank.values(catalog.TRAINING_COLLECTIVE_STEP_SIZE),
    )


def test_the_next_attempt_has_no_series_of_the_one_before(rank: Fed, tmp_path: Path) -> None:
    read(rank, {GATHER: [3, 900]})
    (tmp_path / "next").mkdir()
    again = Fed(tmp_path / "next")
    again.read_by(rank.ledger, {})

    calls, _ = read(again, {REDUCE: [1, 4]})

    assert calls == {"world/all_reduce": 1}


def test_calls_and_bytes_are_means_of_the_steps_that_tell_them(rank: Fed) -> None:
    assert read(rank, None, None) == ({}, {})
    # Every fourth of these steps logs something; that most steps tell nothing changes nothing.
    found = read(rank, None, *[{GATHER: [3, 900]}] * 3, None, {GATHER: [3, 1300], REDUCE: [1, 4]})

    assert found == (
        {"shard/all_gather": 3, "world/all_reduce": 0.25},
        {"shard/all_gather": 1000, "world/all_reduce": 1},
    )
    # Local steps have no collective at all, and count.
    calls, _ = read(rank, {}, {}, {}, {})
    assert calls == {"shard/all_gather": 1.5, "world/all_reduce": 0.125}


def test_a_collective_that_is_no_longer_called_has_no_series(rank: Fed) -> None:
    assert read(rank, {REDUCE: [1, 4]})[0] == {"world/all_reduce": 1}
    assert read(rank, *[{GATHER: [3, 900]}] * 8)[0] == {"shard/all_gather": 3}
