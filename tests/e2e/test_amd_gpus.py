"""A node with AMD's GPUs: series, ranks, status, top and doctor, as for any vendor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from amd_boards import GIB, AmdBoards, mi300x, standin_kernel
from node import Node, until

# What `instrument` writes down of a model on a GPU of ROCm's torch.
RANK = """
import os, sys
import otel_ddp
run = otel_ddp.init()
serial = f"{int(os.environ['HIP_VISIBLE_DEVICES']) + 1:x}ee41f7e0a52c93b".encode().hex()
uuid = "-".join((serial[:8], serial[8:12], serial[12:16], serial[16:20], serial[20:]))
run._records.recorder.documents.facts({"boards": [{"index": 0, "uuid": uuid, "pci": ""}]})
print("there", flush=True)
sys.stdin.read()
"""
SILENT = "import otel_ddp, sys; otel_ddp.init(); print('there', flush=True); sys.stdin.read()"


@pytest.fixture
def boards(tmp_path: Path) -> AmdBoards:
    return AmdBoards(tmp_path)


@pytest.fixture
def node(boards: AmdBoards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    boards.write([mi300x(index) for index in range(4)])
    with Node(
        **boards.environment(standin_kernel(tmp_path_factory)),
        # One that a rank starts is started without LD_PRELOAD.
        OTEL_DDP_AGENT="external",
        OTEL_DDP_SOURCES="gpu",
    ) as node:
        node.start(sys.executable, "-m", "otel_ddp", "agent")
        until(lambda: len(node.series("hw_power_watts")) == 4, "the agent to see the boards")
        yield node


def rank(node: Node, number: int, device: str, code: str = RANK) -> subprocess.Popen[str]:
    started = node.python(
        code,
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE="3",
        OTEL_DDP_RUN="first",
        HIP_VISIBLE_DEVICES=device,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "there\n"
    return started


def told(node: Node, device: int) -> str:
    """The rank under which a board is told of."""
    found = node.series("hw_power_watts", gpu=str(device))
    assert len(found) <= 1, "one number, told once"
    return found[0][0].get("rank", "none") if found else ""


def said(node: Node, command: str) -> str:
    asked = [sys.executable, "-m", "otel_ddp", *command.split()]
    return subprocess.run(asked, env=node.env, capture_output=True, text=True, check=False).stdout


def test_each_board_is_told_of_under_its_rank_and_by_every_view(
    node: Node, boards: AmdBoards
) -> None:
    rank(node, 0, "3")
    rank(node, 1, "1")
    silent = rank(node, 2, "", SILENT)
    shown = [mi300x(index) for index in range(4)]
    shown[2].processes = {silent.pid: 3 * GIB}
    boards.write(shown)

    for number, device in ((0, 3), (1, 1), (2, 2)):
        until(lambda d=device, n=number: told(node, d) == str(n), f"board {device} of {number}")
    assert told(node, 0) == "none"
    (labels, power), *_ = node.series("hw_power_watts", rank="0")
    assert power == 682
    assert labels["hw_id"] == "GPU-4ee41f7e0a52c93b"
    assert labels["hw_model"] == "AMD Instinct MI300X OAM"
    (held,) = until(lambda: node.series("otel_ddp_gpu_process_memory_usage_bytes"), "its memory")
    assert (held[0]["gpu"], held[0]["rank"], held[1]) == ("2", "2", 3 * GIB)

    status, doctor = said(node, "status"), said(node, "doctor")
    assert "AMD driver amdgpu" in status
    assert "AMD driver amdgpu" in doctor
    assert "GPUs: AMD Instinct MI300X OAM (0, 1, 2, 3)" in doctor
    gpus = json.loads(said(node, "status --json"))["agents"][0]["gpus"]
    assert [each["labels"].get("rank") for each in gpus] == [None, "1", "2", "0"]
    top = said(node, "top --once")
    for number, device in ((0, 3), (1, 1), (2, 2)):
        (line,) = [each for each in top.splitlines() if each.split()[:1] == [str(number)]]
        assert line.endswith(f"{device}: 87% 60.0/192.0 GiB 682/750 W 64 °C")
    of_gpus = [line for line in doctor.splitlines() if line.split()[1:2] == ["gpus"]]
    assert len(of_gpus) == 1

    def by_rank() -> dict[str, list[float]]:
        """What the page draws of the boards of ranks."""
        drawn = node.page("node", run="first", name="hw.power")["series"]
        return {each["rank"]: each["columns"]["last"] for each in drawn if each["rank"]}

    shown_power = until(lambda: len(found := by_rank()) == 3 and found, "the page's ranks")
    assert {value for each in shown_power.values() for value in each} == {682}
    page = str([node.page(each, run="first") for each in ("run", "names", "now")])
    assert "4 x AMD Instinct MI300X OAM" in page
    assert "hw.energy" not in page
    assert "throttle" not in page
    assert not any(word in status + top + of_gpus[0] + page for word in ("NVIDIA", "CUDA"))
