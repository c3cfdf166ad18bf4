"""Reads what the disks, the network interfaces and each InfiniBand port have moved."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from otel_ddp.agent.node.source import KernelFiles, Measurement, number
from otel_ddp.vocabulary import catalog

# Hardware, but no disks: drives for media, and parts of a flash chip.
_NO_DISK = re.compile(r"(sr|fd)\d+|mmcblk\d+(boot\d+|rpmb)|mtdblock\d+")
# The unit of /proc/diskstats, whatever the sectors of the disk.
_SECTOR_BYTES = 512
_WORD_BYTES = 4
_MOST_PORTS = 32
# What container runtimes call a container's own interface, which has no hardware behind it.
_OF_CONTAINER = "eth0"


class _Total:
    """The bytes that all devices of one kind have moved, by direction.

    It begins with what the kernel has counted, and goes on by what each device moves between two
    reads. The sum of the kernel's counters would fall when a device goes, and jump when it is back.
    """

    metric: catalog.Metric
    unit = 1
    columns: ClassVar[Mapping[str, int]] = {}
    """By direction, the word of a device's line that counts it."""

    def __init__(self, files: KernelFiles, path: str, folder: str, boot_ns: int) -> None:
        """*path*: what the kernel counts. *folder*: what it knows of each device."""
        self._files = files
        self._path = path
        self._folder = folder
        self._boot_ns = boot_ns
        self._seen: list[str] = []
        self._counted: list[str] = []
        self._before: dict[tuple[str, str], float] | None = None
        self._moved = dict.fromkeys(self.columns, 0.0)

    def read(self) -> list[Measurement]:
        rows = self._rows()
        if [*rows] != self._seen:
            self._seen = [*rows]
            self._counted = [name for name in rows if self._counts(name)]
        now: dict[tuple[str, str], float] = {}
        for name in self._counted:
            for direction, column in self.columns.items():
                word = rows[name][column] if len(rows[name]) > column else "nothing"
                value = number(word)
                if value is None:
                    what = f"{word[:50]!r} is no {self.metric.name}"
                    self._files.leave_out(f"{self._path}, {name}", what)
                else:
                    now[name, direction] = value
        for key, counted in now.items():
            before = 0 if self._before is None else self._before.get(key, counted)
            self._moved[key[1]] += max(counted - before, 0)
        self._before = now
        (attribute,) = self.metric.attributes
        return [
            Measurement(self.metric, moved * self.unit, ((attribute, direction),), self._boot_ns)
            for direction, moved in self._moved.items()
            if any(each == direction for _, each in now)
        ]

    def _rows(self) -> Mapping[str, list[str]]:
        raise NotImplementedError

    def _counts(self, name: str) -> bool:
        raise NotImplementedError

    def _lines(self) -> list[str]:
        return (self._files.text(self._path) or "").splitlines()


class Disks(_Total):
    """Whole disks with hardware behind them.

    Partitions, RAIDs and logical volumes would count the same bytes again; loop, RAM and
    compressed disks are files and memory.
    """

    metric, unit = catalog.SYSTEM_DISK_IO, _SECTOR_BYTES
    columns: ClassVar[Mapping[str, int]] = {"read": 5, "write": 9}

    def _rows(self) -> Mapping[str, list[str]]:
        return {words[2]: words for line in self._lines() if len(words := line.split()) > 2}

    def _counts(self, name: str) -> bool:
        folder = f"{self._folder}/{name.replace('/', '!')}"
        if _NO_DISK.fullmatch(name) or not os.path.exists(f"{folder}/device"):
            return False
        # A hidden one is one of several paths to an NVMe disk, which is counted itself.
        return (self._files.text(f"{folder}/hidden") or "").strip() != "1"


class Network(_Total):
    """Interfaces with hardware behind them, and a container's own one."""

    metric = catalog.SYSTEM_NETWORK_IO
    columns: ClassVar[Mapping[str, int]] = {"receive": 0, "transmit": 8}

    def _rows(self) -> Mapping[str, list[str]]:
        lines = (line.rpartition(":") for line in self._lines())
        return {name.strip(): counts.split() for name, colon, counts in lines if colon}

    def _counts(self, name: str) -> bool:
        folder = f"{self._folder}/{name}"
        if name == _OF_CONTAINER:
            return True
        if not os.path.exists(f"{folder}/device"):
            return False  # a bond, a bridge or a VLAN: the devices below them are counted
        # Clouds put a second device below one that counts for both (Azure, virtio failover).
        if os.path.exists(f"{folder}/master/device"):
            return False
        # A switch in a network card shows a representor for each of its virtual functions.
        port = self._files.text(f"{folder}/phys_port_name") or ""
        return "vf" not in port and "sf" not in port


class Infiniband:
    """Each port, also on Ethernet (RoCE): a network interface does not count RDMA traffic."""

    def __init__(self, files: KernelFiles, sys: Path, boot_ns: int) -> None:
        self._files = files
        self._folder = f"{sys}/class/infiniband"
        self._boot_ns = boot_ns

    def read(self) -> list[Measurement]:
        ports = [
            (f"{card}:{port}", f"{self._folder}/{card}/ports/{port}/counters")
            for card in sorted(self._files.names(self._folder))
            for port in sorted(self._files.names(f"{self._folder}/{card}/ports"))
        ]
        if len(ports) > _MOST_PORTS:
            what = f"only {_MOST_PORTS} of {len(ports)} ports are measured"
            self._files.leave_out(self._folder, what)
        measurements = []
        for port, counters in ports[:_MOST_PORTS]:
            for name, direction in (("port_rcv_data", "receive"), ("port_xmit_data", "transmit")):
                if not (word := (self._files.text(f"{counters}/{name}") or "").strip()):
                    continue  # the port lacks this counter
                metric, moved = catalog.HW_NETWORK_IO, number(word)
                if moved is None:
                    what = f"{word[:50]!r} is no {metric.name}"
                    self._files.leave_out(f"{counters}/{name}", what)
                    continue
                way = ("network.io.direction", direction)
                labels = (("hw.id", port), ("hw.type", "network"), way)
                moved_bytes = moved * _WORD_BYTES
                measurements.append(Measurement(metric, moved_bytes, labels, self._boot_ns))
        return measurements
