"""The stand-in for a device, under real ranks and the real agent: its times are what was queued."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import NamedTuple

import pytest

from node import Node, finished, until
from otlp_receiver import Point, Receiver
from watched import ON_DEVICE

pytestmark = pytest.mark.timed

# Milliseconds of a device for each step; of two all-reduces, the first is hidden by backward.
STEP_MS = {"forward": 4.0, "backward": 8.0, "optimizer": 2.0}
SLOW_MS = {"forward": 6.0, "backward": 12.0, "optimizer": 3.0}
TRANSFER_MS = 0.5
LATE_MS = sum(SLOW_MS.values()) - sum(STEP_MS.values())
# Of "ahead" the launch queue holds all steps, of "slow" ten.
AHEAD_STEPS = 60
SCENARIOS = [
    {"name": "ahead", "all": {"kernels": 10, "steps": AHEAD_STEPS}},
    {"name": "slow", "chosen": {f"{phase}_s": ms / 1000 for phase, ms in SLOW_MS.items()}},
]
SLOW_STEPS = 200


class Totals:
    """By rank, clock and phase: the milliseconds at each export, oldest first."""

    def __init__(self, points: list[Point], run: str) -> None:
        self._exports: dict[tuple[str, str], dict[str, dict[int, float]]]
        self._exports = defaultdict(lambda: defaultdict(dict))
        for each in points:
            said = each.attributes
            if each.metric == "training.phase.time" and said["run"] == run:
                phases = self._exports[said["rank"], said["clock"]]
                phases[said["phase"]][each.time_ns] = each.value * 1000

    def all(self, rank: str, clock: str) -> dict[str, float]:
        """The totals after the last step."""
        phases = self._exports[rank, clock]
        return {phase: values[max(values)] for phase, values in phases.items()}

    def without_first_steps(self, rank: str, clock: str) -> dict[str, float]:
        """The totals since the host was ahead: from the first export with 40 steps on."""
        phases = self._exports[rank, clock]
        least_ms = 40 * STEP_MS["forward"]
        since_ns = min(at for at, ms in phases["forward"].items() if ms > least_ms)
        return {
            phase: values[max(values)] - values.get(since_ns, 0.0)
            for phase, values in phases.items()
        }


def steps_by_host(points: list[Point], run: str, rank: str) -> tuple[int, float]:
    """How many steps there were, and how many milliseconds they took by the clock of the host."""
    found = [
        each.value
        for each in points
        if each.metric == "training.step.duration"
        and (each.attributes["run"], each.attributes["rank"]) == (run, rank)
    ]
    return found[-1].count, found[-1].sum * 1000


class Seen(NamedTuple):
    """Two ranks, of which rank 1 has the slower device."""

    points: list[Point]
    """What the agent has exported."""
    idle_ms: dict[str, dict[str, float]]
    """By rank and phase: how long the device had nothing to do in "ahead", by its own word."""


@pytest.fixture(scope="module")
def seen() -> Seen:
    with Node() as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        process = node.torchrun(2, str(ON_DEVICE), str(node.root), json.dumps(SCENARIOS))

        def enough() -> bool:
            steps = [each["step"] or 0 for each in node.processes() if each["run"] == "slow"]
            return len(steps) == 2 and min(steps) >= SLOW_STEPS

        until(enough, "the steps of the slow device")
        (node.root / "slow.enough").touch()
        finished(process)
        node.stop_agent()
        idle_s = {
            rank: json.loads((node.root / f"ahead.{rank}.idle").read_text()) for rank in ("0", "1")
        }
        idle_ms = {
            rank: {phase: s * 1000 for phase, s in each.items()} for rank, each in idle_s.items()
        }
        return Seen(receiver.points(), idle_ms)


@pytest.fixture(scope="module")
def points(seen: Seen) -> list[Point]:
    return seen.points


def test_the_host_runs_ahead_and_nothing_of_ours_waits_for_the_device(seen: Seen) -> None:
    for rank in ("0", "1"):
        device = Totals(seen.points, "ahead").all(rank, "device")

        # Where its host has no core, the device has nothing to do meanwhile.
        queued_ms = AHEAD_STEPS * STEP_MS["backward"]
        least_ms, most_ms = queued_ms * 0.98, queued_ms * 1.02 + seen.idle_ms[rank]["backward"]
        assert least_ms < device["backward"] < most_ms
        steps, spent_ms = steps_by_host(seen.points, "ahead", rank)
        assert steps == AHEAD_STEPS
        # One that waited in each step would need as long as the device; a busy machine takes more.
        assert spent_ms < 0.8 * sum(device.values())


@pytest.mark.parametrize(("rank", "queued_ms"), [("0", STEP_MS), ("1", SLOW_MS)])
def test_the_device_takes_for_each_phase_what_was_queued(
    points: list[Point], rank: str, queued_ms: dict[str, float]
) -> None:
    device = Totals(points, "slow").without_first_steps(rank, "device")
    steps = round(device["forward"] / queued_ms["forward"])

    assert steps > SLOW_STEPS / 3
    for phase, ms in queued_ms.items():
        assert device[phase] == pytest.approx(steps * ms, rel=0.01)


def test_the_wait_for_the_slow_device_is_on_the_other_device_and_on_no_host(
    points: list[Point],
) -> None:
    totals = Totals(points, "slow")
    fast, slow = (totals.without_first_steps(rank, "device") for rank in ("0", "1"))
    steps = round(fast["forward"] / STEP_MS["forward"])

    assert fast["comm_wait"] == pytest.approx(steps * (LATE_MS + TRANSFER_MS), rel=0.05)
    steps = round(slow["forward"] / SLOW_MS["forward"])
    assert slow["comm_wait"] == pytest.approx(steps * TRANSFER_MS, rel=0.05)
    # The few launches in which a host waits for places in the launch queue.
    for rank in ("0", "1"):
        host, device = totals.all(rank, "host"), totals.all("0", "device")
        assert host["comm_wait"] < device["comm_wait"] / 5
