"""What a rank's node adds to the verdict that it is late: a slow GPU, a core that is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from golden import Golden
from make import labels_of
from otel_ddp.diagnosis.hardware import with_cores, with_gpus
from otel_ddp.diagnosis.straggler.finding import sentence_of
from otel_ddp.diagnosis.verdict import Labels, Verdict

SENTENCE = "rank 1 keeps the others waiting."


def gpu(rank: int | None, clock: float = 1980e6, *throttled: str, run: str = "r") -> dict[str, Any]:
    labels = {"node": "n1"} if rank is None else dict(labels_of(rank, run=run))
    index = "9" if rank is None else str(rank)
    return {
        "index": index,
        "name": "H100",
        "labels": labels,
        "throttled": list(throttled),
        "core_clock_hz": clock,
        "power_w": 400.0,
        "limit_bytes": 80 << 30,
    }


def late(*gpus: dict[str, Any], phase: str = "backward") -> Verdict:
    verdict = Verdict("straggler", labels_of(1), phase, SENTENCE, {"excess": 0.3})
    return with_gpus(verdict, gpus)


def test_a_gpu_that_is_held_back_and_slow_is_named(golden: Golden) -> None:
    found = late(gpu(0), gpu(1, 1200e6, "hw_thermal"), gpu(2), gpu(3, 1975e6))

    golden.check(found.sentence, json.dumps(found.evidence, sort_keys=True))


@pytest.mark.parametrize(
    "gpus",
    [
        [gpu(0, 1980e6, "sw_power"), gpu(1, 1980e6, "sw_power")],
        [gpu(0), gpu(1, 1900e6)],
        # Of those that are free, or another run's, nothing can be expected.
        [gpu(None), gpu(1, 1200e6), gpu(0, run="another")],
    ],
    ids=["all held back", "hardly slower", "no rank beside it"],
)
def test_a_gpu_like_the_others_is_evidence_and_no_reason(gpus: list[dict[str, Any]]) -> None:
    found = late(*gpus)

    assert found.sentence == SENTENCE
    assert found.evidence["gpu"]["index"] == "1"


def test_a_rank_that_waits_for_data_waits_for_no_gpu() -> None:
    assert late(gpu(0), gpu(1, 1200e6, "hw_thermal"), phase="data").sentence == SENTENCE


def test_where_nothing_is_known_of_the_gpu_the_verdict_does_not_change() -> None:
    for gpus in ([], [gpu(0)], [gpu(1), gpu(1)]):
        found = late(*gpus)
        assert (found.sentence, found.evidence) == (SENTENCE, {"excess": 0.3})


def test_where_gpus_tell_no_reasons_of_throttling_a_verdict_has_no_empty_list() -> None:
    late_gpu, other = gpu(1, 1200e6), gpu(0)
    del late_gpu["throttled"], other["throttled"]

    found = late(late_gpu, other)

    assert found.sentence.endswith("at 1200 MHz, those of the others at 1980.")
    assert "throttled" not in str(found.evidence)


# -- the GPUs of a node


def on(node: str, rank: int, clock: float, *throttled: str) -> dict[str, Any]:
    found = gpu(rank, clock, *throttled)
    return {**found, "labels": dict(labels_of(rank, node=node))}


@pytest.mark.parametrize("known", [False, True], ids=["others not known", "others known"])
def test_what_most_gpus_of_a_late_node_have_is_told(known: bool, golden: Golden) -> None:
    mine = [on("n1", rank, 1300e6, "hw_thermal") for rank in range(3)]
    odd = on("n1", 3, 1980e6, "sw_power")
    others = [on("n2", rank, 1980e6) for rank in (4, 5) if known]
    node = (("group", "g"), ("run", "r"), ("node", "n1"))

    found = with_gpus(Verdict("straggler", node, "compute", SENTENCE, {}), [*mine, odd, *others])

    golden.check(found.sentence, json.dumps(found.evidence, sort_keys=True))


# -- its core

EVIDENCE = {
    "step_s": 0.1,
    "step_without_s": 0.07,
    "excess_s": 0.03,
    "lost_per_s": 0.9,
    "others": 3,
    "excess_by_phase": {"data": 0.3},
    "clock": "device",
}
OTHERS = {labels_of(0): 0.02, labels_of(2): 0.04}


def waiting(**more: Any) -> Verdict:
    verdict = Verdict("straggler", labels_of(1), "data", "", {**EVIDENCE, **more})
    return verdict._replace(sentence=sentence_of(verdict))


def test_a_rank_that_waits_for_its_core_is_advised_to_look_there(golden: Golden) -> None:
    found = with_cores(waiting(), {**OTHERS, labels_of(1): 0.4})

    golden.check(found.sentence)
    more = {"waited_for_core_s": 0.04, "others_waited_for_core_s": 0.003}
    assert found.evidence == {**EVIDENCE, **more}


@pytest.mark.parametrize(
    "cores",
    [
        # All wait as long; the others are of another run; nothing is known of this rank.
        {labels_of(0): 0.3, labels_of(1): 0.4},
        {labels_of(0, run="another"): 0.0, labels_of(1): 0.4},
        OTHERS,
    ],
)
def test_where_that_does_not_explain_the_excess_nothing_is_said_of_it(
    cores: dict[Labels, float],
) -> None:
    assert with_cores(waiting(), cores) == waiting()


def test_a_rank_without_a_device_is_not_advised_to_look_at_one() -> None:
    late = waiting(clock="host")._replace(phase="compute")

    assert "this rank's cores" in sentence_of(late)
    assert "device" not in sentence_of(late)
