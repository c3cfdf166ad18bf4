"""Ranks that differ by nature, or wait in several groups: no false name, and the true reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node import until
from watched import Watched, opened

pytestmark = pytest.mark.timed

PROGRAM = Path(__file__).parents[1] / "parallel.py"
UNKNOWN = "insufficient data: waiting for other ranks cannot be told from work on rank 0, 1, 2, 3"
SILENT = {
    "pipeline of 2": UNKNOWN,
    "pipeline of 4": UNKNOWN,
    "tp_fsdp": UNKNOWN,
    "experts": "insufficient data: collectives of your own in `forward`, `backward`",
}
OF_RANKS = ("straggler", "imbalance", "recurring", "stall")


@pytest.fixture
def watched() -> Any:
    with Watched(program=PROGRAM, world=4, OTEL_DDP_STALL_TIMEOUT_S="2") as watched:
        yield watched


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("pipeline of 2",), 200),
        pytest.param(tuple(SILENT), 2_000, marks=pytest.mark.stress),
    ],
)
def test_where_stages_and_experts_differ_by_nature_no_rank_is_ever_named(
    watched: Watched, names: tuple[str, ...], steps: int
) -> None:
    def enough(name: str) -> bool:
        return watched.was_compared(name, steps)

    watched.play([{"name": each} for each in names], enough, patience_s=0.3 * steps + 180)

    for name in names:
        assert watched.seen[name].insufficient.startswith(SILENT[name])
    records = watched.records()
    assert [opened(records, name, *OF_RANKS) for name in names] == [[] for _ in names]


def test_of_ranks_that_wait_in_two_groups_the_one_that_hangs_is_named_alone(
    watched: Watched,
) -> None:
    watched.start([{"name": "tp_fsdp", "hangs": 20}])

    (verdict,) = until(lambda: watched.verdicts("tp_fsdp", "stall"), "the verdict")
    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("not_reached", ["3"])
    assert "ranks 0, 1, 2 wait for it" in verdict["sentence"]
