"""Verdicts by what torch's recorder for NCCL tells of collectives: hangs, and waits in phases.

The device and its recorder are the stand-ins of `device_standin`; all else is the real thing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from node import Node, finished, until

pytestmark = pytest.mark.timed

TRAIN = Path(__file__).parents[1] / "device_standin" / "train.py"
# The kernel tells the signal that has ended a process from here on.
TELLS_EXITS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
TIMING = "TORCH_NCCL_ENABLE_TIMING"
STALL_LIMIT_S = 2
# A short ring is soon written down, so that ranks may be asked as often as the agent would.
RING = 166
HANGS_IN = 60
# The first step has one bucket, all others two. What hangs is between the two of its step.
HANGS_BEFORE = 2 * HANGS_IN - 1
STEP = {"first_load_s": 0.1}
HANG = {"all": STEP, "chosen": {"hangs_in": HANGS_IN}}
# A host that asks for its loss in each step is not ahead, and has put fewer collectives in line.
HANG_BESIDE_ITEM = {**HANG, "first": {"asks_every": 1}}
GATHERS = {
    # A host that is ahead by one step leaves the recorder the collectives of most others.
    "all": {**STEP, "gathers": True, "kernels": 1000, "jitter": 0.01},
    # A device that is slow is unsteady, too.
    "chosen": {"forward_s": 0.005, "backward_s": 0.01, "optimizer_s": 0.0025, "jitter": 0.1},
}


class Launch:
    """Ranks whose collectives torch times, and ranks where it does not, beside each other."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.chosen = str(world // 2)
        self.waiting = ", ".join(str(rank) for rank in range(world) if rank != world // 2)
        self.everyone = ", ".join(map(str, range(world)))
        self.stalls: dict[str, dict[str, Any]] = {}
        self.deaths: dict[str, dict[str, Any]] = {}
        env = {"OTEL_DDP_STALL_TIMEOUT_S": str(STALL_LIMIT_S), "TORCH_FR_BUFFER_SIZE": str(RING)}
        with Node(**env) as node:
            self._node = node
            node.env[TIMING] = "1"
            gathers = self._start({"name": "gathers", **GATHERS})
            self._start({"name": "hang", **HANG})
            del node.env[TIMING]
            self._start({"name": "gathers untimed", **GATHERS}, {"name": "hang untimed", **HANG})
            node.env["STANDIN_BACKEND"] = "standin_ccl"
            self._start({"name": "hang unrecorded", **HANG_BESIDE_ITEM})
            self._see_hang("hang", f"the device of rank {self.chosen}")
            self._see_hang("hang unrecorded", f"the device of rank {self.chosen}", watched=False)
            self.insufficient = self._see_insufficient("gathers untimed")
            self._see_hang("hang untimed", f"the device of rank {self.chosen}")
            self.straggler = self._see("gathers", "straggler")
            (node.root / "gathers.enough").touch()
            finished(gathers)

    def _start(self, *scenarios: dict[str, Any]) -> subprocess.Popen[str]:
        return self._node.torchrun(
            self.world, str(TRAIN), str(self._node.root), json.dumps(scenarios)
        )

    def _see(self, run: str, kind: str, words: str = "") -> dict[str, Any]:
        """The verdict of this kind on a run, once it has these words."""

        def found() -> dict[str, Any] | None:
            for each in self._node.agent()["verdicts"]:
                if (each["kind"], each["who"]["run"]) == (kind, run) and words in each["sentence"]:
                    return dict(each)
            return None

        return dict(until(found, f"the {kind} of {run}"))

    def _see_hang(self, run: str, words: str, *, watched: bool = True) -> None:
        """Its stall, once the ranks have answered; then they end as by NCCL's watchdog, if any."""
        self.stalls[run] = self._see(run, "stall", words)
        for each in self._node.processes():
            if each["run"] == run:
                os.kill(each["pid"], signal.SIGABRT)
        self.deaths[run] = self._see(run, "death", "watchdog" if TELLS_EXITS and watched else "")

    def _see_insufficient(self, run: str) -> str:
        """What is said once the ranks have been asked; then the next scenario follows."""

        def why() -> str:
            found = self._node.insufficient(run)
            return found if "cannot be told" in found and "asked yet" not in found else ""

        found = str(until(why, f"the ranks of {run} to be asked"))
        self.untimed_verdicts = [
            each["kind"] for each in self._node.agent()["verdicts"] if each["who"]["run"] == run
        ]
        (self._node.root / f"{run}.enough").touch()
        return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, id="2 ranks"),
        pytest.param(4, id="4 ranks", marks=pytest.mark.stress),
    ],
)
def launch(request: pytest.FixtureRequest) -> Launch:
    return Launch(request.param)


def culprits(verdict: dict[str, Any]) -> tuple[str, list[str]]:
    return verdict["evidence"]["cause"], verdict["evidence"]["culprits"]


def test_a_device_that_hangs_is_named_with_its_phase_step_and_collective(launch: Launch) -> None:
    verdict = launch.stalls["hang"]

    assert culprits(verdict) == ("device", [launch.chosen])
    # Both are of the device: its host has gone on until its launch queue was full.
    assert (verdict["phase"], verdict["step"]) == ("backward", HANGS_IN - 1)
    assert (
        f"the device of rank {launch.chosen} after step {HANGS_IN - 1} has not come to "
        "all_reduce [[64]], "
        f"collective number {HANGS_BEFORE}, which the host has put in line"
    ) in verdict["sentence"]
    waits = "rank 0 waits" if launch.world == 2 else f"ranks {launch.waiting} wait"
    assert f"{waits} for it" in verdict["sentence"]


@pytest.mark.parametrize("run", ["hang untimed", "hang unrecorded"])
def test_where_torch_times_no_collectives_the_clocks_of_the_devices_say_which_computes(
    launch: Launch, run: str
) -> None:
    verdict = launch.stalls[run]

    assert culprits(verdict) == ("device", [launch.chosen])
    assert (verdict["phase"], verdict["step"]) == ("backward", HANGS_IN - 1)
    assert (
        f"the device of rank {launch.chosen} is in backward after step {HANGS_IN - 1} and does not "
        "go on, while its host is in "
    ) in verdict["sentence"]
    waits = "rank 0 waits" if launch.world == 2 else f"ranks {launch.waiting} wait"
    assert f"{waits} for it" in verdict["sentence"]


@pytest.mark.skipif(not TELLS_EXITS, reason="this kernel keeps signals to itself")
@pytest.mark.parametrize(
    ("run", "why"),
    [
        (
            "hang",
            f"the device of rank {{chosen}} after step {HANGS_IN - 1} has not come to all_reduce",
        ),
        ("hang untimed", f"the device of rank {{chosen}} is in backward after step {HANGS_IN - 1}"),
    ],
)
def test_a_death_after_it_is_the_watchdogs_with_why_no_rank_had_moved(
    launch: Launch, run: str, why: str
) -> None:
    sentence = launch.deaths[run]["sentence"]

    watchdog, _, before = sentence.partition(". Before that, no rank had moved for ")
    assert watchdog.endswith(
        "Most likely the watchdog of NCCL, which ends ranks whose collectives do not end"
    )
    assert why.format(chosen=launch.chosen) in before


def test_a_slow_device_is_named_where_waits_lie_inside_forward_and_backward(
    launch: Launch,
) -> None:
    verdict, evidence = launch.straggler, launch.straggler["evidence"]

    assert (verdict["who"]["rank"], verdict["phase"]) == (launch.chosen, "compute")
    assert (evidence["clock"], evidence["side"]) == ("device", "device")
    assert evidence["told_by"] == "arrivals at collectives"
    # 3.5 of some 20 ms: 17.5 of its own work, and five transfers.
    assert evidence["excess"] == pytest.approx(0.175, abs=0.03)


def test_without_times_of_collectives_the_word_is_what_to_set(launch: Launch) -> None:
    assert launch.insufficient == (
        "insufficient data: waiting for other ranks cannot be told from work on rank "
        f"{launch.everyone}; torch does not time collectives: set {TIMING}=1 before the process "
        "group is made"
    )
    assert not {"straggler", "imbalance", "regression"} & set(launch.untimed_verdicts)
