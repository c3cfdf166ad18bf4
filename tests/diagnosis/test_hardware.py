"""What a rank's GPU adds to the verdict that it is late."""

from __future__ import annotations

from typing import Any

import pytest

from make import labels_of
from otel_ddp.diagnosis.hardware import with_gpu
from otel_ddp.diagnosis.verdict import Verdict

RUN = {"group": "g", "run": "r", "job_type": "train", "node": "n1"}
SENTENCE = "rank 1 keeps the others waiting."


def gpu(rank: int | None, clock: float = 1980e6, *throttled: str, run: str = "r") -> dict[str, Any]:
    labels = {"node": "n1"} if rank is None else dict(labels_of(rank, run=run))
    index = "9" if rank is None else str(rank)
    return {
        "index": index,
        "name": "H100",
        "labels": labels,
        "throttled": list(throttled),
        "sm_clock_hz": clock,
        "power_w": 400.0,
        "limit_bytes": 80 << 30,
    }


def late(*gpus: dict[str, Any], phase: str = "backward") -> Verdict:
    verdict = Verdict("straggler", labels_of(1), phase, SENTENCE, {"excess": 0.3})
    return with_gpu(verdict, gpus)


def test_a_gpu_that_is_held_back_and_slow_is_named() -> None:
    found = late(gpu(0), gpu(1, 1200e6, "hw_thermal"), gpu(2), gpu(3, 1975e6))

    assert found.sentence == (
        f"{SENTENCE} Its GPU 1 is held back (hw_thermal) and runs at 1200 MHz, those of the "
        "others at 1980."
    )
    assert found.evidence == {
        "excess": 0.3,
        "gpu": {
            "index": "1",
            "throttled": ["hw_thermal"],
            "sm_clock_hz": 1200e6,
            "power_w": 400.0,
        },
    }


@pytest.mark.parametrize(
    "gpus",
    [
        [gpu(0), gpu(1)],
        [gpu(0, 1980e6, "sw_power"), gpu(1, 1980e6, "sw_power")],
        [gpu(0), gpu(1, 1900e6)],
        # Of those that are free, or another run's, nothing can be expected.
        [gpu(None), gpu(1, 1200e6), gpu(0, run="another")],
    ],
    ids=["alike", "all held back", "hardly slower", "no rank beside it"],
)
def test_a_gpu_like_the_others_is_evidence_and_no_reason(gpus: list[dict[str, Any]]) -> None:
    found = late(*gpus)

    assert found.sentence == SENTENCE
    assert found.evidence["gpu"]["index"] == "1"


def test_a_rank_that_waits_for_data_waits_for_no_gpu() -> None:
    assert late(gpu(0), gpu(1, 1200e6, "hw_thermal"), phase="data").sentence == SENTENCE


def test_where_nothing_is_known_of_the_gpu_the_verdict_does_not_change() -> None:
    for gpus in ([], [gpu(0)], [gpu(1), gpu(1)], [{}], [{"labels": 3}]):
        found = late(*gpus)
        assert (found.sentence, found.evidence) == (SENTENCE, {"excess": 0.3})
    bare = {"labels": dict(labels_of(1))}
    assert late(bare, {"labels": dict(labels_of(0)), "throttled": 7}).sentence == SENTENCE


def test_of_a_board_and_the_part_of_it_that_is_used_the_part_counts() -> None:
    board = {**gpu(1), "uuid": "GPU-1", "parent": ""}
    part = {**gpu(1), "uuid": "MIG-1", "parent": "GPU-1", "index": "1:0"}

    assert late(gpu(0), board, part).evidence["gpu"]["index"] == "1:0"
