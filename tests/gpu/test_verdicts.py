"""Verdicts on two ranks of real devices, with one GPU too: docs/gpu.md."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from node import Node, finished, until

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

TRAIN = Path(__file__).parent / "train.py"
# Two ranks on one device, since this version.
SHARED_SINCE = 23000
# Name: settings of all ranks, of the last one, and the phase and the side that are to be named.
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str] | None]] = {
    "slow device": ({}, {"forward_ms": 16, "backward_ms": 32}, ("compute", "device")),
    "slow device, asked each step": (
        {"asks_every": 1},
        {"forward_ms": 16, "backward_ms": 32},
        ("compute", "device"),
    ),
    "late data": ({"forward_ms": 2, "backward_ms": 4}, {"load_ms": 40}, ("data", "host")),
    "late data, host ahead": ({}, {"load_ms": 15}, None),
    "balanced": ({}, {}, None),
}


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def two_ranks(backend: str) -> dict[str, str]:
    """Variables with which two ranks train here; skips where they cannot."""
    if backend == "gloo" or torch.cuda.device_count() > 1:
        return {}
    found = ctypes.c_int()
    # The one that is loaded: torch tells the version that it was built with.
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    if found.value < SHARED_SINCE:
        pytest.skip(f"NCCL {found.value}: two ranks on one GPU need {SHARED_SINCE}")
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def torchrun(node: Node, backend: str, *scenarios: Mapping[str, Any]) -> Any:
    how = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = (str(TRAIN), backend, str(node.root), json.dumps(scenarios))
    return node.start(sys.executable, *how, *program)


def verdicts(node: Node, run: str) -> list[dict[str, Any]]:
    return [each for each in node.agent()["verdicts"] if each["who"]["run"] == run]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_who_is_late_is_named_and_nobody_else(
    name: str, backend: str, record_property: Callable[[str, object], None]
) -> None:
    every, last, expected = SCENARIOS[name]
    if expected is None and torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU a rank: on one, ranks take turns of 2 ms, and one of them is late")
    with Node(**two_ranks(backend)) as node:
        process = torchrun(node, backend, {"name": name, "all": every, "last": last})

        def steps() -> int:
            return min([each["step"] or 0 for each in node.processes()] or [0])

        def late() -> list[dict[str, Any]]:
            return [each for each in verdicts(node, name) if each["kind"] == "straggler"]

        until(lambda: steps() >= 300 or (expected and late()), "300 steps, or a verdict")
        found, insufficient = late(), node.insufficient(name)
        (node.root / f"{name}.enough").touch()
        finished(process)

    for each in found:
        record_property("sentence", each["sentence"])
        record_property("step", each["step"])
    record_property("insufficient", insufficient)
    said = [
        (each["who"]["rank"], each["phase"], each["evidence"].get("side", "")) for each in found
    ]
    assert said == ([("1", *expected)] if expected else [])
    assert insufficient == ""


def test_a_device_that_hangs_is_named_with_its_collective(
    record_property: Callable[[str, object], None],
) -> None:
    env = {"OTEL_DDP_STALL_TIMEOUT_S": "10", "TORCH_NCCL_ENABLE_TIMING": "1", **two_ranks("nccl")}
    with Node(**env) as node:
        process = torchrun(node, "nccl", {"name": "hang", "last": {"hangs_at": 100}})
        (verdict,) = until(
            lambda: [each for each in verdicts(node, "hang") if each["kind"] == "stall"], "a stall"
        )
        record_property("sentence", verdict["sentence"])
        os.killpg(process.pid, signal.SIGKILL)

    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("device", ["1"])


@pytest.mark.parametrize("timing", ["0", "1"])
def test_what_timing_of_collectives_costs(
    timing: str, record_property: Callable[[str, object], None]
) -> None:
    # The figure belongs into docs/gpu.md: nothing is asserted of it.
    with Node(TORCH_NCCL_ENABLE_TIMING=timing, **two_ranks("nccl")) as node:
        short = {"name": "timing", "all": {"forward_ms": 0.1, "backward_ms": 0.1, "steps": 2000}}
        finished(torchrun(node, "nccl", short))
        until(lambda: node.value("training_steps_total", rank="0") == 2000, "all steps")
        spent = node.series("training_phase_time_seconds_total", rank="0", clock="host")
        record_property("ms a step", round(sum(value for _, value in spent) / 2, 4))
