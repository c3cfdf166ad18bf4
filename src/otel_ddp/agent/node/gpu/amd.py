"""AMD's GPUs, by the files of the kernel's driver amdgpu."""

from __future__ import annotations

from collections.abc import Sequence

from otel_ddp import files
from otel_ddp.agent.node.gpu.driver import Device, User
from otel_ddp.agent.node.gpu.kernel_boards import (
    COUNTING_S,
    MOVING_S,
    SETTLED_S,
    KernelBoards,
    Row,
    names_in,
)
from otel_ddp.vocabulary import catalog

_MICRO, _MILLI = 1e6, 1e3


class Amd(KernelBoards):
    """Those of amdgpu. A board in partitions is one device."""

    vendor = "AMD"
    modules = ("amdgpu",)
    hiding = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    rows = (
        Row(catalog.HW_GPU_UTILIZATION, MOVING_S, ("gpu_busy_percent",), 100, "general"),
        Row(catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION, MOVING_S, ("mem_busy_percent",), 100),
        Row(catalog.HW_GPU_MEMORY_USAGE, MOVING_S, ("mem_info_vram_used",)),
        Row(catalog.HW_GPU_MEMORY_LIMIT, MOVING_S, ("mem_info_vram_total",)),
        Row(
            catalog.HW_TEMPERATURE,
            MOVING_S,
            # Boards of data centres have no sensor at the edge.
            ("hwmon/temp.edge_input", "hwmon/temp.junction_input"),
            _MILLI,
            "core",
        ),
        Row(catalog.HW_TEMPERATURE, MOVING_S, ("hwmon/temp.mem_input",), _MILLI, "memory"),
        # It depends on the board whether the driver has the mean or the moment.
        Row(
            catalog.HW_POWER,
            MOVING_S,
            ("hwmon/power1_average", "hwmon/power1_input"),
            _MICRO,
        ),
        Row(catalog.OTEL_DDP_GPU_POWER_LIMIT, SETTLED_S, ("hwmon/power1_cap",), _MICRO),
        Row(
            catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY, MOVING_S, ("hwmon/freq.sclk_input",), word="core"
        ),
        Row(
            catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY,
            MOVING_S,
            ("hwmon/freq.mclk_input",),
            word="memory",
        ),
        Row(catalog.HW_FAN_SPEED_RATIO, SETTLED_S, ("hwmon/pwm1",), 255, "0"),
        Row(catalog.HW_ERRORS, COUNTING_S, ("ras/umc_err_count",), 1, "corrected", "ce"),
        Row(catalog.HW_ERRORS, COUNTING_S, ("ras/umc_err_count",), 1, "uncorrected", "ue"),
        Row(catalog.OTEL_DDP_GPU_PCIE_REPLAYS, SETTLED_S, ("pcie_replay_count",)),
    )

    def identity(self, folder: str, address: str) -> tuple[str, str]:
        serial = (files.read_text(f"{folder}/unique_id") or "").strip()
        product = (files.read_text(f"{folder}/product_name") or "").strip()
        kind = (files.read_text(f"{folder}/device") or "").strip().removeprefix("0x")
        name = product or f"AMD GPU {kind}".strip()
        # As rocminfo spells it; the address does for boards that the driver has no number of.
        return (f"GPU-{serial}" if serial.strip("0") else address), name

    def users(self, device: Device) -> Sequence[User]:
        kfd = str(self.sys / "class/kfd/kfd")
        mine = self._number_of(kfd, device.pci)
        found = []
        for pid in names_in(f"{kfd}/proc") if mine else ():
            used = files.read_text(f"{kfd}/proc/{pid}/vram_{mine}")
            # Every process of ROCm opens all boards; one computes where it holds memory.
            if pid.isdecimal() and used and (used_bytes := int(used)):
                found.append(User(int(pid), used_bytes))
        return found

    @staticmethod
    def _number_of(kfd: str, pci: str) -> str:
        """What the compute driver calls the board at this address; empty if it has none."""
        for node in names_in(f"{kfd}/topology/nodes"):
            here = f"{kfd}/topology/nodes/{node}"
            lines = (files.read_text(f"{here}/properties") or "").splitlines()
            said = dict(each.split(None, 1) for each in lines if " " in each)
            place = int(said.get("location_id", "0"))
            address = f"{int(said.get('domain', '0')):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}"
            if place and pci.startswith(address):
                return (files.read_text(f"{here}/gpu_id") or "").strip()
        return ""
