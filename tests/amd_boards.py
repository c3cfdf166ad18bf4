"""AMD's GPUs for tests: the files that the kernel's driver amdgpu would show of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30
# A node of the compute driver that is no GPU.
_PROCESSOR = {"gpu_id": "0", "properties": "cpu_cores_count 64\nlocation_id 0\ndomain 0"}


@dataclass
class AmdBoard:
    """A board; its place among the others is in its address and its number."""

    index: int
    files: dict[str, str] = field(default_factory=dict)
    """By their path in the board's folder; one that is not there is not supported."""
    processes: dict[int, int] = field(default_factory=dict)
    """The bytes of each process."""
    given: bool = True
    """Whether the container has its device file."""

    @property
    def address(self) -> str:
        return f"0000:{self.index + 0x2B:02x}:00.0"

    @property
    def serial(self) -> str:
        return f"{self.index + 1:x}ee41f7e0a52c93b"


def mi300x(index: int = 0) -> AmdBoard:
    """A board of data centres that has everything; the names are those of the kernel's manual."""
    board = AmdBoard(index)
    board.files = {
        "unique_id": board.serial,
        "product_name": "AMD Instinct MI300X OAM",
        "device": "0x74a1",
        "gpu_busy_percent": "87",
        "mem_busy_percent": "41",
        "mem_info_vram_total": str(192 * GIB),
        "mem_info_vram_used": str(60 * GIB),
        "pcie_replay_count": "2",
        "ras/umc_err_count": "ue: 1\nce: 12\nde: 0",
        "ras/gfx_err_count": "ue: 7\nce: 7",
        "hwmon/hwmon5/temp1_label": "junction",
        "hwmon/hwmon5/temp1_input": "64000",
        "hwmon/hwmon5/temp2_label": "mem",
        "hwmon/hwmon5/temp2_input": "71000",
        "hwmon/hwmon5/power1_input": "682000000",
        "hwmon/hwmon5/power1_cap": "750000000",
        "hwmon/hwmon5/freq1_label": "sclk",
        "hwmon/hwmon5/freq1_input": "2100000000",
        "hwmon/hwmon5/freq2_label": "mclk",
        "hwmon/hwmon5/freq2_input": "1300000000",
    }
    return board


def radeon(index: int = 0) -> AmdBoard:
    """A board of a desktop: no number, no name, a fan, an edge, no counts of errors."""
    board = mi300x(index)
    lacking = ("unique_id", "product_name", "ras/", "hwmon/hwmon5/power1", "pcie_replay")
    board.files = {k: v for k, v in board.files.items() if not k.startswith(lacking)} | {
        "device": "0x744c",
        "hwmon/hwmon5/temp3_label": "edge",
        "hwmon/hwmon5/temp3_input": "48000",
        "hwmon/hwmon5/power1_average": "220000000",
        "hwmon/hwmon5/power1_cap": "0",
        "hwmon/hwmon5/pwm1": "51",
    }
    return board


class AmdBoards:
    """The tree of files; its `sys` and `dev` stand for the machine's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sys, self.dev = root / "sys", root / "dev"

    def write(self, boards: Sequence[AmdBoard]) -> None:
        """Show these boards; a file that there already is gets its new content at once."""
        kfd = "sys/class/kfd/kfd"
        found = {f"{kfd}/topology/nodes/0/{k}": v for k, v in _PROCESSOR.items()}
        for board in boards:
            folder, node = f"sys/bus/pci/drivers/amdgpu/{board.address}", board.index + 1
            found |= {f"{folder}/{name}": content for name, content in board.files.items()}
            found[f"{folder}/drm/renderD{128 + board.index}/dev"] = "226:128"
            if board.given:
                found[f"dev/dri/renderD{128 + board.index}"] = ""
            topology = f"{kfd}/topology/nodes/{node}"
            found[f"{topology}/gpu_id"] = str(1000 + node)
            place = (board.index + 0x2B) << 8
            found[f"{topology}/properties"] = f"simd_count 1216\nlocation_id {place}\ndomain 0"
            for pid, used in board.processes.items():
                found[f"{kfd}/proc/{pid}/vram_{1000 + node}"] = str(used)
        self._put(found)

    def _put(self, found: Mapping[str, str]) -> None:
        for name, content in found.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}")
            fresh.write_text(f"{content}\n")
            fresh.replace(path)
