"""Verdicts by what torch's recorder for NCCL tells of collectives: hangs, and waits in phases.

The device and its recorder are the stand-ins of `device_standin`; all else is the real thing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest

from node import Node, finished, until
from otel_ddp.vocabulary.words import TIME_COLLECTIVES
from watched import ON_DEVICE

pytestmark = pytest.mark.timed

CHOSEN = "1"
BLAMED = f"the device of rank {CHOSEN}"
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
GATHERS = {
    # A host that is ahead by one step leaves the recorder the collectives of most others.
    "all": {**STEP, "gathers": True, "kernels": 1000, "jitter": 0.01},
    # A device that is slow is unsteady, too.
    "chosen": {"forward_s": 0.005, "backward_s": 0.01, "optimizer_s": 0.0025, "jitter": 0.1},
}


class Launch:
    """Ranks whose collectives torch times, and ranks where it does not, beside each other."""

    def __init__(self) -> None:
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
            self._see_hang("hang", BLAMED)
            self.insufficient = self._see_insufficient("gathers untimed")
            self._see_hang("hang untimed", BLAMED)
            self.straggler = self._see("gathers", "straggler")
            (node.root / "gathers.enough").touch()
            finished(gathers)

    def _start(self, *scenarios: dict[str, Any]) -> subprocess.Popen[str]:
        return self._node.torchrun(2, str(ON_DEVICE), str(self._node.root), json.dumps(scenarios))

    def _see(self, run: str, kind: str, words: str = "") -> dict[str, Any]:
        """The verdict of this kind on a run, once it has these words."""

        def found() -> dict[str, Any] | None:
            for each in self._node.agent()["verdicts"]:
                if (each["kind"], each["who"]["run"]) == (kind, run) and words in each["sentence"]:
                    return dict(each)
            return None

        return dict(until(found, f"the {kind} of {run}"))

    def _see_hang(self, run: str, words: str) -> None:
        """Its stall, once the ranks have answered; then they end as by NCCL's watchdog."""
        self.stalls[run] = self._see(run, "stall", words)
        for each in self._node.processes():
            if each["run"] == run:
                os.kill(each["pid"], signal.SIGABRT)
        self.deaths[run] = self._see(run, "death", "watchdog" if TELLS_EXITS else "")

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


@pytest.fixture(scope="module")
def launch() -> Launch:
    return Launch()


def culprits(verdict: dict[str, Any]) -> tuple[str, list[str]]:
    return verdict["evidence"]["cause"], verdict["evidence"]["culprits"]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("hang", f"has not come to all_reduce [[64]], collective number {HANGS_BEFORE}, which"),
        # Where torch times no collectives, the clocks of the devices say which computes.
        ("hang untimed", "and does not go on, while its host is in "),
    ],
)
def test_a_device_that_hangs_is_named_with_its_phase_and_step(
    launch: Launch, run: str, why: str
) -> None:
    verdict = launch.stalls[run]

    assert culprits(verdict) == ("device", [CHOSEN])
    # Both are of the device: its host has gone on until its launch queue was full.
    assert (verdict["phase"], verdict["step"]) == ("backward", HANGS_IN - 1)
    assert why in verdict["sentence"]
    assert "rank 0 waits for it" in verdict["sentence"]


@pytest.mark.skipif(not TELLS_EXITS, reason="this kernel keeps signals to itself")
@pytest.mark.parametrize("run", ["hang", "hang untimed"])
def test_a_death_after_it_is_the_watchdogs_with_why_no_rank_had_moved(
    launch: Launch, run: str
) -> None:
    watchdog, _, before = launch.deaths[run]["sentence"].partition(". Before that, ")
    assert "the watchdog of NCCL" in watchdog
    assert BLAMED in before


def test_a_slow_device_is_named_where_waits_lie_inside_forward_and_backward(
    launch: Launch,
) -> None:
    verdict, evidence = launch.straggler, launch.straggler["evidence"]

    assert (verdict["who"]["rank"], verdict["phase"]) == (CHOSEN, "compute")
    assert (evidence["clock"], evidence["side"]) == ("device", "device")
    assert evidence["told_by"] == "arrivals at collectives"
    # 3.5 of some 20 ms: 17.5 of its own work, and five transfers.
    assert evidence["excess"] == pytest.approx(0.175, abs=0.03)


def test_without_times_of_collectives_the_word_is_what_to_set(launch: Launch) -> None:
    assert launch.insufficient.endswith(
        f"on rank 0, 1; torch does not time collectives: {TIME_COLLECTIVES}"
    )
    assert not {"straggler", "imbalance", "regression"} & set(launch.untimed_verdicts)
