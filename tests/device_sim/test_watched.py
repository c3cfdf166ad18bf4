"""otel_ddp on the asynchronous device: real ranks, hooks, journals, and the real agent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from node import Node, until
from otlp_receiver import Point
from watched import Watched, assert_nobody_named, opened

pytestmark = pytest.mark.timed

PROGRAM = Path(__file__).with_name("train.py")
SPEED = ("straggler", "imbalance", "regression", "stall")
# A rank becomes late in this step: all that is left out of comparing at the beginning is over.
BEGINS = 40
# The program asks for its loss itself, for the last time in the last step.
ASKS = {"steps": 200, "asks_every": 40}
# What takes a device 6 ms in all steps, and 30 % more on one rank.
FAST_S, SLOW_S = 0.006, 0.0078


class Named(NamedTuple):
    """What the verdict on the chosen rank is to say."""

    phase: str
    side: str


# Name: the verdict, what all ranks do, and what the chosen one does.
LATE: dict[str, tuple[Named, dict[str, float], dict[str, float]]] = {
    **{
        f"slow {phase}": (
            Named(phase, "device"),
            {f"{phase}_s": FAST_S},
            {f"{phase}_s": SLOW_S},
        )
        for phase in ("forward", "backward", "optimizer")
    },
    "late data": (Named("data", "host"), {}, {"load_s": 0.03}),
    "slow launches": (Named("forward", "host"), {}, {"launch_s": 0.02}),
}
SCENARIOS: list[dict[str, Any]] = [
    {"name": "bare", "all": {**ASKS, "is_watched": False}},
    {"name": "phases", "all": {**ASKS, "forward_s": FAST_S, "optimizer_s": 0.004}},
    *(
        {"name": name, "all": every, "chosen": own, "begins": BEGINS}
        for name, (_, every, own) in LATE.items()
    ),
    {"name": "balanced"},
]
# What never becomes a verdict is looked at after so many steps; one that was not reached by the
# most never comes.
STEPS, MOST_STEPS = 300, 600


class Seen(NamedTuple):
    watched: Watched
    records: list[tuple[Any, dict[str, str]]]
    points: list[Point]
    devices: dict[tuple[str, str], dict[str, Any]]
    """What each program saw of its own device, by scenario and rank."""

    def device_s(self, run: str, rank: str) -> dict[str, float]:
        """By phase, at the end: the device's time of all steps."""
        told = {"run": run, "rank": rank, "clock": "device"}
        return {
            each.attributes["phase"]: each.value
            for each in self.points
            if each.metric == "training.phase.time" and told.items() <= each.attributes.items()
        }


@pytest.fixture(scope="module")
def seen() -> Seen:
    with Watched(program=PROGRAM) as watched:

        def enough(name: str) -> bool:
            if name in LATE:
                late = watched.verdicts(name, "straggler")
                return bool(late) or watched.was_compared(name, MOST_STEPS)
            if name == "balanced":
                return watched.was_compared(name, STEPS)
            return all((watched.node.root / f"{name}.{rank}.device").exists() for rank in "01")

        watched.play(SCENARIOS, enough)
        records = watched.records()
        devices = {
            (each["name"], rank): json.loads(
                (watched.node.root / f"{each['name']}.{rank}.device").read_text()
            )
            for each in SCENARIOS
            for rank in "01"
        }
        return Seen(watched, records, watched.points(), devices)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_nothing_waits_for_the_device_but_the_program(seen: Seen, rank: str) -> None:
    assert seen.devices["bare", rank]["waits"] == {"item": 5}
    assert seen.devices["phases", rank]["waits"] == {"item": 5}
    # There is a question in every 50 steps of this program, whether it was seen enough.
    assert set(seen.devices["balanced", rank]["waits"]) == {"item"}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_phases_of_the_device_are_right_within_2_percent(seen: Seen, rank: str) -> None:
    told = seen.device_s("phases", rank)
    told["backward"] += told.pop("comm_wait")
    own = seen.devices["phases", rank]

    for phase in ("forward", "backward", "optimizer"):
        # The clock begins within the first steps.
        assert 0.98 * own["seconds_later"][phase] < told[phase] < 1.02 * own["seconds"][phase]


@pytest.mark.parametrize("name", LATE)
def test_a_late_rank_is_named_with_its_phase_and_the_side_that_is_late(
    seen: Seen, name: str
) -> None:
    (verdict,) = seen.watched.verdicts_of(name, *SPEED)

    assert (verdict["kind"], verdict["who"]["rank"]) == ("straggler", "1")
    assert (verdict["phase"], verdict["evidence"]["side"]) == LATE[name][0]
    assert verdict["evidence"]["clock"] == "device"
    assert len(opened(seen.records, name, *SPEED)) == 1


@pytest.mark.parametrize("name", ["balanced", "phases"])
def test_of_equal_ranks_none_is_named(seen: Seen, name: str) -> None:
    if name == "balanced":
        assert_nobody_named(seen.watched, name)
    assert opened(seen.records, name, *SPEED) == []


HANGS_AT = 60


def hang(chosen: dict[str, int], **env: str) -> dict[str, Any]:
    """The verdict where no rank goes on, with what the chosen one does in that step."""
    with Node(OTEL_DDP_STALL_TIMEOUT_S="2", **env) as node:
        scenario = {"name": "hang", "chosen": chosen}
        process = node.torchrun(2, str(PROGRAM), str(node.root), json.dumps([scenario]))

        def stalls() -> list[dict[str, Any]]:
            found = [each for each in node.agent()["verdicts"] if each["kind"] == "stall"]
            # The ranks have been asked where they are.
            return [each for each in found if "rank 1" in each["sentence"]]

        (verdict,) = until(stalls, "the rank that hangs")
        os.killpg(process.pid, signal.SIGKILL)
    return dict(verdict)


def test_a_kernel_that_never_ends_is_a_hang_of_the_device_of_its_rank() -> None:
    verdict = hang({"hangs_at": HANGS_AT})

    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("device", ["1"])
    assert (verdict["phase"], verdict["step"]) == ("backward", HANGS_AT - 1)
    assert "the device of rank 1 is in backward" in verdict["sentence"]
    assert "rank 0 waits for it" in verdict["sentence"]


def test_where_events_keep_the_lock_the_rank_with_a_full_launch_queue_is_named() -> None:
    sentence = hang({"hangs_at": HANGS_AT}, EVENTS_KEEP_LOCK="1")["sentence"]

    # No thread of that rank can be asked where its device is.
    assert "the launch queue of rank 1 is full, where otel_ddp itself waits for a place" in sentence


def test_a_host_that_does_not_come_to_a_collective_is_named_with_its_line() -> None:
    verdict = hang({"stays_away_at": HANGS_AT})

    assert verdict["evidence"]["culprits"] == ["1"]
    assert (verdict["phase"], verdict["step"]) == ("forward", HANGS_AT - 1)
    assert "rank 1 is in forward" in verdict["sentence"]
    assert "(forward) and sleeps; rank 0 waits for it" in verdict["sentence"]
