"""Verdicts where hosts run ahead of their devices, on two real ranks.

The device is the stand-in of `device_standin`; hooks, journals and the agent are the real ones.
What more ranks do, and other leads of the hosts, the simulation shows: test_device_cases.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from watched import ON_DEVICE, Scenario, Watched, assert_nobody_named, opened

pytestmark = pytest.mark.timed

SPEED = ("straggler", "imbalance", "regression", "stall")
# A step of a device, and 1 ms of waiting for the network, half of it hidden by backward.
STEP = {"forward_s": 0.003, "backward_s": 0.006, "optimizer_s": 0.001, "first_load_s": 0.1}
# The hosts are fifty steps ahead where nothing keeps them from it, and may be late by as much.
FAR_AHEAD = {"kernels": 20}
SLOWER = {"forward_s": 0.0039, "backward_s": 0.0078}

# A rank becomes late in this step: all that is left out of comparing at the beginning is over.
BEGINS = 40


class Named(NamedTuple):
    """What the verdict on the chosen rank is to say."""

    phase: str
    side: str


def scenario(
    expected: Named | None = None, every: Scenario | None = None, **ranks: Scenario
) -> Scenario:
    """What ranks do, see `Settings` in the program: all of them, and the `chosen` one."""
    begins = BEGINS if expected else 0
    return {"all": {**STEP, **(every or {})}, **ranks, "begins": begins, "expected": expected}


SCENARIOS = {
    "slow device": scenario(Named("compute", "device"), every=FAR_AHEAD, chosen=SLOWER),
    "late data": scenario(Named("data", "host"), chosen={"load_s": 0.03}),
    "slow launches": scenario(Named("forward", "host"), chosen={"launch_s": 0.02}),
    # The host needs 6 of the 11 ms that its device needs for a step.
    "late data, host ahead": scenario(chosen={"load_s": 0.006}),
    # One host happens to be ahead of the other, and its device waits for the other's. A step is so
    # long that a core that is taken for 2 ms of it is no excess.
    "all load slowly": scenario(every={"load_s": 0.06}),
    "no clock": scenario(chosen={**SLOWER, "has_clock": False}),
    "all launch slowly": scenario(
        every={"forward_s": 0.001, "backward_s": 0.002, "launch_s": 0.008, "asks_every": 1}
    ),
}
LATE = tuple(name for name, each in SCENARIOS.items() if each["expected"])
WITH_VERDICT = (*LATE, "all launch slowly")
# What never becomes a verdict is looked at after so many steps.
STEPS = 170
# From there, most verdicts come within so many steps. All do on a machine of one's own, and in the
# simulation; where ranks lose their cores, it takes more to be sure.
SOON = 120
# A verdict that was not reached by then never comes.
MOST_STEPS = 400


class Played(NamedTuple):
    watched: Watched
    records: list[tuple[Any, dict[str, str]]]


@pytest.fixture(scope="module")
def played() -> Played:
    told = [
        {"name": name, **{key: value for key, value in each.items() if key != "expected"}}
        for name, each in SCENARIOS.items()
    ]
    with Watched(program=ON_DEVICE) as watched:

        def enough(name: str) -> bool:
            if name not in WITH_VERDICT:
                return watched.was_compared(name, STEPS)
            kinds = ("straggler",) if name in LATE else ("bound",)
            return bool(watched.verdicts(name, *kinds)) or watched.was_compared(name, MOST_STEPS)

        watched.play(told, enough)
        return Played(watched, watched.records())


@pytest.mark.parametrize("name", LATE)
def test_a_late_rank_is_named_with_its_phase_and_the_side_that_is_late(
    played: Played, name: str
) -> None:
    expected, chosen = SCENARIOS[name]["expected"], played.watched.chosen
    (verdict,) = played.watched.verdicts_of(name, *SPEED)

    assert (verdict["kind"], verdict["who"]["rank"]) == ("straggler", chosen)
    assert verdict["phase"] == expected.phase
    assert (verdict["evidence"]["clock"], verdict["evidence"]["side"]) == ("device", expected.side)
    late = [labels for labels, value in played.watched.seen[name].straggler if value]
    assert [(each["rank"], each["phase"], each["side"]) for each in late] == [(chosen, *expected)]
    assert len(opened(played.records, name, *SPEED)) == 1


def test_most_ranks_that_become_late_are_named_within_120_steps(played: Played) -> None:
    took = sorted(played.watched.verdicts_of(name, *SPEED)[0]["step"] - BEGINS for name in LATE)

    assert took[len(took) // 2] <= SOON, took


@pytest.mark.parametrize("name", ["late data, host ahead", "all load slowly"])
def test_of_hosts_that_only_differ_in_how_far_they_are_ahead_none_is_named(
    played: Played, name: str
) -> None:
    assert_nobody_named(played.watched, name)
    assert opened(played.records, name, *SPEED) == []


def test_without_the_clock_of_one_device_it_is_said_that_nothing_can_be_said(
    played: Played,
) -> None:
    seen = played.watched.seen["no clock"]

    assert seen.insufficient == (
        "insufficient data: the waits are on the device, whose clock is not known on rank 1"
    )
    assert seen.straggler == []
    assert opened(played.records, "no clock", *SPEED) == []


def test_where_all_ranks_launch_slowly_the_run_is_launch_bound_and_none_is_named(
    played: Played,
) -> None:
    (verdict,) = played.watched.seen["all launch slowly"].verdicts

    assert (verdict["kind"], verdict["phase"]) == ("bound", "launch")
    assert opened(played.records, "all launch slowly", *SPEED) == []
