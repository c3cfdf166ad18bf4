"""Device memory that a rank never gives back, by the device's own allocator: twelve minutes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from node import Node, until

PROGRAM = Path(__file__).with_name("train.py")
# Some 50 MB a minute, in steps of 10 ms.
KEPT = 8_000


@pytest.mark.stress
@pytest.mark.usefixtures("device_sim")
def test_memory_that_grows_on_the_device_of_one_rank_is_told_with_its_pace() -> None:
    scenario = {"name": "creep", "chosen": {"keeps_bytes": KEPT}}
    with Node() as node:
        began_s = time.monotonic()
        process = node.torchrun(2, str(PROGRAM), str(node.root), json.dumps([scenario]))
        (verdict,) = until(
            lambda: [each for each in node.agent()["verdicts"] if each["kind"] == "creep"],
            "memory that grows",
            patience_s=900.0,
        )
        steps = min(each["step"] for each in node.processes())
        took_s = time.monotonic() - began_s
        os.killpg(process.pid, signal.SIGKILL)

    assert (verdict["who"]["rank"], verdict["evidence"]["memory_of"]) == ("1", "device")
    assert "the memory of the device of rank 1" in verdict["sentence"]
    pace = verdict["evidence"]["bytes_per_s"]
    # Its allocator hands out whole blocks.
    assert pace == pytest.approx(KEPT * steps / took_s, rel=0.15)
