"""A core that is taken: what the scheduler says of the ranks, and what is advised."""

from __future__ import annotations

import pytest

from make import labels_of
from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.hardware import core_hint
from otel_ddp.diagnosis.verdict import Labels

EVIDENCE = {"step_s": 0.1, "excess_s": 0.03}


def rank(has_device: bool) -> RankState:
    return RankState(labels_of(1), device_clock=True if has_device else None)


OTHERS = {labels_of(0): 0.02, labels_of(2): 0.04}


@pytest.mark.parametrize("has_device", [False, True])
@pytest.mark.parametrize("phase", ["compute", "forward", "data"])
def test_a_rank_that_waits_for_its_core_is_advised_to_look_there(
    phase: str, has_device: bool
) -> None:
    cores = {**OTHERS, labels_of(1): 0.4}

    advice, more = core_hint(rank(has_device), phase, EVIDENCE, cores)

    assert advice.startswith(
        "Its core is taken: in each step it is ready to run and has no core for 40 ms, the others "
        "for 3 ms."
    )
    assert more == {"waited_for_core_s": 0.04, "others_waited_for_core_s": 0.003}


@pytest.mark.parametrize(
    "cores",
    [
        # It waits a little; all wait as long; the others are of another run; nothing is known.
        {**OTHERS, labels_of(1): 0.1},
        {labels_of(0): 0.3, labels_of(1): 0.4},
        {labels_of(0, run="another"): 0.0, labels_of(1): 0.4},
        OTHERS,
        {},
    ],
)
def test_where_that_does_not_explain_the_excess_nothing_is_said_of_it(
    cores: dict[Labels, float],
) -> None:
    assert core_hint(rank(True), "compute", EVIDENCE, cores) == ("", {})


@pytest.mark.parametrize("phase", ["compute", "mixed"])
def test_a_rank_without_a_device_is_not_advised_to_look_at_one(phase: str) -> None:
    advice, _ = core_hint(rank(False), phase, EVIDENCE, {})

    assert "cores" in advice
    assert "device" not in advice
    assert core_hint(rank(True), phase, EVIDENCE, {}) == ("", {})
    assert core_hint(rank(False), "forward", EVIDENCE, {}) == ("", {})
