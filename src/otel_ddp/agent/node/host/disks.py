"""Reads the bytes read from and written to the node's disks."""

from __future__ import annotations

import os
import re
from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.kernel_files import KernelFiles, number
from otel_ddp.agent.node.measurement import Measurement

_MOST_DISKS = 64
# The unit of /proc/diskstats, whatever the sectors of the disk.
_SECTOR_BYTES = 512
# Hardware, but no disks: drives for media, and parts of a flash chip.
_NO_DISK = re.compile(r"(sr|fd)\d+|mmcblk\d+(boot\d+|rpmb)|mtdblock\d+")


class Disks:
    """Whole disks with hardware behind them.

    Partitions, RAIDs and logical volumes would count the same bytes again; loop, RAM and
    compressed disks are files and memory.
    """

    def __init__(
        self, files: KernelFiles, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")
    ) -> None:
        self._files = files
        self._path = f"{proc}/diskstats"
        self._blocks = f"{sys}/block"
        self._seen: frozenset[str] = frozenset()
        self._chosen: frozenset[str] = frozenset()

    def read(self, boot_ns: int) -> list[Measurement]:
        rows = [line.split() for line in (self._files.text(self._path) or "").splitlines()]
        names = frozenset(row[2] for row in rows if len(row) > 2)
        if names != self._seen:
            self._seen, self._chosen = names, self._choose(names)
        measurements: list[Measurement] = []
        for row in rows:
            if len(row) < 10:
                self._files.leave_out(self._path, "a line is too short")
            elif row[2] in self._chosen:
                for direction, word in (("read", row[5]), ("write", row[9])):
                    sectors = number(word)
                    if sectors is None:
                        self._files.leave_out(
                            f"{self._path}, {row[2]}", f"{direction} is no number"
                        )
                        continue
                    attributes = (("system.device", row[2]), ("disk.io.direction", direction))
                    used_bytes = sectors * _SECTOR_BYTES
                    measurements.append(
                        Measurement(catalog.SYSTEM_DISK_IO, used_bytes, attributes, boot_ns)
                    )
        return measurements

    def _choose(self, names: frozenset[str]) -> frozenset[str]:
        disks = sorted(name for name in names if self._is_disk(name))
        if len(disks) > _MOST_DISKS:
            self._files.leave_out(
                self._path, f"only {_MOST_DISKS} of {len(disks)} disks are measured"
            )
        return frozenset(disks[:_MOST_DISKS])

    def _is_disk(self, name: str) -> bool:
        folder = f"{self._blocks}/{name.replace('/', '!')}"
        if _NO_DISK.fullmatch(name) or not os.path.exists(f"{folder}/device"):
            return False
        # A hidden one is one of several paths to an NVMe disk, which is counted itself.
        hidden = self._files.text(f"{folder}/hidden")
        return hidden is None or hidden.strip() != "1"
