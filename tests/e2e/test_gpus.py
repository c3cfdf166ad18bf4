"""A node with eight GPUs: each of them is told of under the rank that uses it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import Labels, Node, until
from nvml_boards import Boards, h100, standin_library

# Where each rank is sent to, by CUDA_VISIBLE_DEVICES: torch counts it as its first one.
SENT_TO = (3, 4, 5, 0, 7, 6, 2, 1)

# What `instrument` writes down of a model on a GPU.
RANK = """
import os, sys
import otel_ddp
run = otel_ddp.init()
uuid = f"{int(os.environ['CUDA_VISIBLE_DEVICES']):08x}-7a5b-4c3d-9e1f-0123456789ab"
run._records.recorder.documents.facts({"boards": [{"index": 0, "uuid": uuid}]})
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def boards(tmp_path: Path) -> Boards:
    return Boards(tmp_path)


@pytest.fixture
def node(boards: Boards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    boards.write([h100(index) for index in range(8)])
    with Node(
        **boards.environment(standin_library(tmp_path_factory)),
        OTEL_DDP_AGENT="auto",
        OTEL_DDP_SOURCES="gpu",
    ) as node:
        yield node


def rank(node: Node, number: int, device: int, **env: str) -> subprocess.Popen[str]:
    started = node.python(
        RANK,
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE="9",
        OTEL_DDP_RUN="first",
        OTEL_DDP_GROUP="g",
        CUDA_VISIBLE_DEVICES=str(device),
        **env,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "there\n"
    return started


def told(node: Node, device: int) -> Labels:
    """The labels of a GPU's power, without what is the GPU's own."""
    found = node.series("hw_power_watts", gpu=str(device))
    assert len(found) <= 1, "one number, told once"
    own = ("hw_id", "hw_type", "hw_model", "gpu", "node", "group", "job_type")
    return {k: v for k, v in found[0][0].items() if k not in own} if found else {"": "none yet"}


def test_each_gpu_is_told_of_under_its_rank(node: Node) -> None:
    ranks = [rank(node, number, device) for number, device in enumerate(SENT_TO)]

    for number, device in enumerate(SENT_TO):
        theirs = {"run": "first", "rank": str(number), "local_rank": str(number)}
        until(lambda d=device, t=theirs: told(node, d) == t, f"GPU {device} of rank {number}")
    powers = node.series("hw_power_watts")
    assert len(powers) == 8
    assert {labels["group"] for labels, _ in powers} == {"g"}

    # A rank is killed: nobody uses its GPU any more, and the series under its name is gone.
    os.kill(ranks[3].pid, signal.SIGKILL)
    until(lambda: told(node, SENT_TO[3]) == {}, "its GPU to be free")
    assert not node.series("hw_power_watts", rank="3")


def test_where_rank_0_alone_is_exported_all_gpus_of_the_node_are_told_of(node: Node) -> None:
    for number, device in enumerate(SENT_TO[:2]):
        rank(node, number, device, OTEL_DDP_STRATEGY="main")

    for number, device in enumerate(SENT_TO[:2]):
        theirs = {"run": "first", "rank": str(number), "local_rank": str(number)}
        until(lambda d=device, t=theirs: told(node, d) == t, f"GPU {device} of rank {number}")
    assert len(node.series("hw_power_watts")) == 8
    assert [labels["rank"] for labels, _ in node.series("training_state")] == ["0"]


def test_a_driver_that_hangs_holds_nothing_up(node: Node, boards: Boards) -> None:
    rank(node, 0, 2)
    until(lambda: told(node, 2).get("rank") == "0", "the GPU of the rank")

    stuck = [h100(index) for index in range(8)]
    stuck[0].hang = True
    boards.write(stuck)

    # What is not known any more is not shown; that it is not known, is.
    until(lambda: not node.series("hw_power_watts"), "old numbers to go")
    assert (node.value("otel_ddp_source_age_seconds", source="gpu") or 0) > 1
    assert node.value("training_state", rank="0") is not None
    # It writes its file a moment after its series.
    remarks = ["the GPU driver does not answer"]
    until(lambda: node.agent()["gpu_remarks"] == remarks, "the remark")

    boards.write([h100(index) for index in range(8)])
    until(lambda: told(node, 2).get("rank") == "0", "the GPU to be back")
