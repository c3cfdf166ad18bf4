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


def steps_by_host(points: list[Point], run: str, rank: str) -> int:
    found = [
        each.value.count
        for each in points
        if each.metric == "training.step.duration"
        and (each.attributes["run"], each.attributes["rank"]) == (run, rank)
    ]
    return int(found[-1])


class Device(NamedTuple):
    """What a device did beside its work, by its own word."""

    idle_s: dict[str, float]
    """By phase: how long it had nothing to do."""
    lead_s: float
    """How much it had yet to do when its host was furthest ahead."""
    disturbed_s: float
    """How long it idled, or heard of others too late, since its host was ahead."""


class Seen(NamedTuple):
    """Two ranks, of which rank 1 has the slower device."""

    points: list[Point]
    """What the agent has exported."""
    devices: dict[tuple[str, str], Device]
    """By scenario and rank."""

    def disturbed_ms(self, rank: str) -> float:
        """What a busy machine may have added to the times of this device in "slow"."""
        return self.devices["slow", rank].disturbed_s * 1000


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
        devices = {
            (name, rank): Device(**json.loads((node.root / f"{name}.{rank}.device").read_text()))
            for name in ("ahead", "slow")
            for rank in ("0", "1")
        }
        return Seen(receiver.points(), devices)


def test_the_host_runs_ahead_and_nothing_of_ours_waits_for_the_device(seen: Seen) -> None:
    for rank in ("0", "1"):
        device = Totals(seen.points, "ahead").all(rank, "device")

        # Where its host has no core, the device has nothing to do meanwhile.
        queued_ms = AHEAD_STEPS * STEP_MS["backward"]
        idle_ms = seen.devices["ahead", rank].idle_s["backward"] * 1000
        assert queued_ms * 0.98 < device["backward"] < queued_ms * 1.02 + idle_ms
        assert steps_by_host(seen.points, "ahead", rank) == AHEAD_STEPS
        # One that waited in each step would never be two steps ahead.
        assert seen.devices["ahead", rank].lead_s * 1000 > 2 * sum(STEP_MS.values())


@pytest.mark.parametrize(("rank", "queued_ms"), [("0", STEP_MS), ("1", SLOW_MS)])
def test_the_device_takes_for_each_phase_what_was_queued(
    seen: Seen, rank: str, queued_ms: dict[str, float]
) -> None:
    device = Totals(seen.points, "slow").without_first_steps(rank, "device")
    steps = round(min(device[phase] / ms for phase, ms in queued_ms.items()))

    assert steps > SLOW_STEPS / 3
    for phase, ms in queued_ms.items():
        least_ms, most_ms = 0.99 * steps * ms, 1.01 * steps * ms + seen.disturbed_ms(rank)
        assert least_ms < device[phase] < most_ms


def test_the_wait_for_the_slow_device_is_on_the_other_device_and_on_no_host(seen: Seen) -> None:
    totals = Totals(seen.points, "slow")
    fast, slow = (totals.without_first_steps(rank, "device") for rank in ("0", "1"))
    # Where one is disturbed, the other waits longer for it, and it waits less itself.
    disturbed_ms = seen.disturbed_ms("0") + seen.disturbed_ms("1")

    waits_ms = round(fast["optimizer"] / STEP_MS["optimizer"]) * (LATE_MS + TRANSFER_MS)
    assert 0.95 * waits_ms - disturbed_ms < fast["comm_wait"] < 1.05 * waits_ms + disturbed_ms
    waits_ms = round(slow["optimizer"] / SLOW_MS["optimizer"]) * TRANSFER_MS
    assert 0.95 * waits_ms < slow["comm_wait"] < 1.05 * waits_ms + disturbed_ms
    # The few launches in which a host waits for places in the launch queue.
    for rank in ("0", "1"):
        host, device = totals.all(rank, "host"), totals.all("0", "device")
        assert host["comm_wait"] < device["comm_wait"] / 5
