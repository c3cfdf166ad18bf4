"""Device memory that a rank never gives back, by the device's own allocator: two minutes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gpu import device
from node import Node, until

pytestmark = [pytest.mark.timed, pytest.mark.gpu]

PROGRAM = Path(__file__).with_name("train.py")
# On our own device that is 50 MB a minute.
MEMORY_BYTES, FILLS_IN_S = 400_000_000, 480.0
# A step of some 40 ms: the fewer, the more is left for other tests.
STEP = {"forward_s": 0.01, "backward_s": 0.03}


def test_memory_that_grows_on_the_device_of_one_rank_is_told_with_its_pace(
    request: pytest.FixtureRequest, record_property: pytest.Function
) -> None:
    env = {}
    if not os.environ.get(device.VARIABLE):
        request.getfixturevalue("device_sim")
        env[device.MEMORY] = str(MEMORY_BYTES)
    record_property("expected", "creep: the device of rank 1, its pace, when it is full")
    scenario = {"name": "creep", "all": STEP, "chosen": {"fills_in_s": FILLS_IN_S}}
    with Node(**env) as node:
        process = node.torchrun(2, str(PROGRAM), str(node.root), json.dumps([scenario]))
        (verdict,) = until(
            lambda: [each for each in node.agent()["verdicts"] if each["kind"] == "creep"],
            "memory that grows",
            patience_s=300.0,
        )
        os.killpg(process.pid, signal.SIGKILL)
    record_property("seen", verdict["sentence"])

    assert (verdict["who"]["rank"], verdict["evidence"]["memory_of"]) == ("1", "device")
    assert "the memory of the device of rank 1" in verdict["sentence"]
    # Its allocator hands out whole blocks.
    pace = verdict["evidence"]["limit_bytes"] / FILLS_IN_S
    assert verdict["evidence"]["bytes_per_s"] == pytest.approx(pace, rel=0.15)
