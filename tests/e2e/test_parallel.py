"""Ranks that differ by nature, or wait in several groups: no false name, and the true reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node import until
from watched import Watched

pytestmark = pytest.mark.timed

PROGRAM = Path(__file__).parents[1] / "parallel.py"


@pytest.fixture
def watched() -> Any:
    with Watched(program=PROGRAM, world=4, OTEL_DDP_STALL_TIMEOUT_S="2") as watched:
        yield watched


def test_of_ranks_that_wait_in_two_groups_the_one_that_hangs_is_named_alone(
    watched: Watched,
) -> None:
    watched.start([{"name": "tp_fsdp", "hangs": 20}])

    (verdict,) = until(lambda: watched.verdicts("tp_fsdp", "stall"), "the verdict")
    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("not_reached", ["3"])
    assert "ranks 0, 1, 2 wait for it" in verdict["sentence"]
