"""A node with one of Intel's GPUs: the tree of files that the kernel's driver xe shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from otel_ddp.agent.node.gpu.intel import Intel

ADDRESS = "0000:03:00.0"
# As Level Zero has the bytes: vendor, device, revision, domain, bus, device, function.
UUID = "86800be2-0000-0000-0300-000000000000"
FILES = {
    "device": "0xe20b",
    "revision": "0x00",
    "drm/renderD128/dev": "226:128",
    "tile0/gt0/freq0/act_freq": "2400",
    "hwmon/hwmon3/energy1_input": "5000000",
    "hwmon/hwmon3/power1_max": "190000000",
    "hwmon/hwmon3/temp2_label": "pkg",
    "hwmon/hwmon3/temp2_input": "61000",
    "hwmon/hwmon3/temp3_label": "vram",
    "hwmon/hwmon3/temp3_input": "70000",
}


class IntelBoard:
    """Its `sys` and `dev` stand for the machine's; `now` is the clock of its driver."""

    now = 100.0

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = f"sys/bus/pci/drivers/xe/{ADDRESS}"
        for name, content in FILES.items():
            self.put(f"{self.folder}/{name}", content)
        self.put("dev/dri/renderD128", "")
        # A processor's own graphics are no board.
        self.put("sys/bus/pci/drivers/i915/0000:00:02.0/drm/renderD128/dev", "226:128")

    def put(self, name: str, content: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    def spend(self, joules: float) -> None:
        """Its counter of energy stands there now."""
        self.put(f"{self.folder}/hwmon/hwmon3/energy1_input", str(round(joules * 1e6)))

    def driver(self, clock: Callable[[], float] | None = None) -> Intel:
        return Intel(
            sys=self.root / "sys",
            dev=self.root / "dev",
            proc=self.root / "proc",
            boot_ns=lambda: 7,
            clock=clock or (lambda: self.now),
        )
