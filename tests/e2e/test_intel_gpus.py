"""A node with one of Intel's GPUs: series, ranks, status, top and doctor, as for any vendor."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from amd_boards import standin_kernel
from intel_boards import ADDRESS, UUID, IntelBoard
from node import Node, until

# What `instrument` writes down of a model on torch's xpu: of an older torch the UUID alone.
RANK = """
import sys
import otel_ddp
run = otel_ddp.init()
run._records.recorder.documents.facts({{"boards": [{{"index": 0, "uuid": "{}", "pci": "{}"}}]}})
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("uuid", "pci"), [(UUID, ""), ("", ADDRESS)], ids=["uuid", "address"])
def test_its_board_is_told_of_under_its_rank_and_by_every_view(
    uuid: str, pci: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    board = IntelBoard(tmp_path)
    with Node(
        KERNEL_STANDIN=str(tmp_path),
        LD_PRELOAD=str(standin_kernel(tmp_path_factory)),
        OTEL_DDP_AGENT="external",
        OTEL_DDP_SOURCES="gpu",
        OTEL_DDP_RUN="first",
    ) as node:
        node.start(sys.executable, "-m", "otel_ddp", "agent")
        rank = node.python(RANK.format(uuid, pci), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        assert rank.stdout is not None
        assert rank.stdout.readline() == "there\n"

        def of_rank() -> bool:
            return bool(node.series("hw_temperature_celsius", rank="0"))

        until(of_rank, "the board under its rank")
        spent = 5

        def has_power() -> bool:
            # The kernel has no power of it, but a counter of energy that grows.
            nonlocal spent
            spent += 300
            board.spend(spent)
            return (node.value("hw_power_watts", rank="0") or 0) > 0

        until(has_power, "its power")
        told = node.series("hw_temperature_celsius", rank="0", hw_sensor_location="core")
        assert [value for _, value in told] == [61]

        def said(*command: str) -> str:
            asked = [sys.executable, "-m", "otel_ddp", *command]
            done = subprocess.run(asked, env=node.env, capture_output=True, text=True, check=False)
            return done.stdout

        status, top, doctor = said("status"), said("top", "--once"), said("doctor")

        def drawn() -> dict[str, set[float]]:
            """The temperatures of the rank's board, as the page has them."""
            return {
                each["hw.sensor_location"]: {*each["columns"]["last"]}
                for each in node.page("node", run="first", name="hw.temperature")["series"]
                if each["rank"] == "0"
            }

        of_page = until(drawn, "the board under its rank on the page")
        page = str([node.page(each, run="first") for each in ("run", "names", "now")])

    assert of_page == {"core": {61}, "memory": {70}}
    assert "1 x Intel GPU e20b" in page
    assert "hw.gpu.utilization" not in page
    assert "hw.gpu.memory" not in page
    assert "Intel driver xe" in status
    assert "GPUs: Intel GPU e20b (0)" in doctor
    (line,) = [each for each in top.splitlines() if each.split()[:1] == ["0"]]
    assert re.search(r" 0: \d+/190 W 61 °C$", line), "what the kernel does not tell is left out"
    of_gpus = [each for each in doctor.splitlines() if each.split()[1:2] == ["gpus"]]
    assert not any(
        word in status + top + page + "".join(of_gpus) for word in ("NVIDIA", "CUDA", "AMD")
    )
