"""Reads what the disks, the network interfaces and each InfiniBand port have moved."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from otel_ddp.agent.node.source import KernelFiles, Measurement
from otel_ddp.vocabulary import catalog

# Hardware, but no disks: drives for media, and parts of a flash chip.
_NO_DISK = re.compile(r"(sr|fd)\d+|mmcblk\d+(boot\d+|rpmb)|mtdblock\d+")
# The unit of /proc/diskstats, whatever the sectors of the disk.
_SECTOR_BYTES = 512
_WORD_BYTES = 4
# What container runtimes call a container's own interface, which has no hardware behind it.
_OF_CONTAINER = "eth0"

Moved = Mapping[str, Mapping[str, int]]
"""The bytes that each device has moved, by direction."""


class Total:
    """The bytes that all devices of one kind have moved, by direction.

    It begins with what the kernel has counted, and goes on by what each device moves between two
    reads. The sum of the kernel's counters would fall when a device goes, and jump when it is back.
    """

    def __init__(
        self,
        files: KernelFiles,
        metric: catalog.Metric,
        path: str,
        parse: Callable[[str], Moved],
        counts: Callable[[str], bool],
        boot_ns: int,
    ) -> None:
        """*path*: what the kernel counts. *counts*: whether a device is counted, by its name."""
        self._files = files
        self._metric = metric
        self._path = path
        self._parse = parse
        self._counts = counts
        self._boot_ns = boot_ns
        self._seen: Collection[str] = ()
        self._counted: list[str] = []
        self._before: Moved | None = None
        self._moved: Counter[str] = Counter()

    def read(self) -> list[Measurement]:
        rows = self._files.read(self._path, self._parse)
        if rows is None:
            return []
        if rows.keys() != self._seen:
            self._seen = rows.keys()
            self._counted = [name for name in rows if self._counts(name)]
        now = {name: rows[name] for name in self._counted}
        for name, counted in now.items():
            before = {} if self._before is None else self._before.get(name, counted)
            for direction, count in counted.items():
                self._moved[direction] += max(count - before.get(direction, 0), 0)
        self._before = now
        (attribute,) = self._metric.attributes
        return [
            Measurement(self._metric, moved, ((attribute, direction),), self._boot_ns)
            for direction, moved in self._moved.items()
        ]


def disks(files: KernelFiles, proc: Path, sys: Path, boot_ns: int) -> Total:
    """Whole disks with hardware behind them.

    Partitions, RAIDs and logical volumes would count the same bytes again; loop, RAM and
    compressed disks are files and memory.
    """

    def parse(text: str) -> Moved:
        rows = [line.split() for line in text.splitlines()]
        return {
            row[2]: {"read": int(row[5]) * _SECTOR_BYTES, "write": int(row[9]) * _SECTOR_BYTES}
            for row in rows
        }

    def counts(name: str) -> bool:
        folder = f"{sys}/block/{name.replace('/', '!')}"
        if _NO_DISK.fullmatch(name) or not os.path.exists(f"{folder}/device"):
            return False
        # A hidden one is one of several paths to an NVMe disk, which is counted itself.
        return files.read(f"{folder}/hidden", int) != 1

    metric = catalog.SYSTEM_DISK_IO
    return Total(files, metric, f"{proc}/diskstats", parse, counts, boot_ns)


def network(files: KernelFiles, proc: Path, sys: Path, boot_ns: int) -> Total:
    """Interfaces with hardware behind them, and a container's own one."""

    def parse(text: str) -> Moved:
        lines = (line.rpartition(":") for line in text.splitlines())
        rows = {name.strip(): counts.split() for name, colon, counts in lines if colon}
        return {
            name: {"receive": int(row[0]), "transmit": int(row[8])} for name, row in rows.items()
        }

    def counts(name: str) -> bool:
        folder = f"{sys}/class/net/{name}"
        if name == _OF_CONTAINER:
            return True
        if not os.path.exists(f"{folder}/device"):
            return False  # a bond, a bridge or a VLAN: the devices below them are counted
        # Clouds put a second device below one that counts for both (Azure, virtio failover).
        if os.path.exists(f"{folder}/master/device"):
            return False
        # A switch in a network card shows a representor for each of its virtual functions.
        port = files.read(f"{folder}/phys_port_name", str) or ""
        return "vf" not in port and "sf" not in port

    return Total(files, catalog.SYSTEM_NETWORK_IO, f"{proc}/net/dev", parse, counts, boot_ns)


def infiniband(files: KernelFiles, sys: Path, boot_ns: int) -> list[Measurement]:
    """Each port, also on Ethernet (RoCE): a network interface does not count RDMA traffic."""
    folder = f"{sys}/class/infiniband"
    measurements = []
    for card in sorted(files.names(folder) or ()):
        for port in sorted(files.names(f"{folder}/{card}/ports") or ()):
            for name, direction in (("port_rcv_data", "receive"), ("port_xmit_data", "transmit")):
                words = files.read(f"{folder}/{card}/ports/{port}/counters/{name}", int)
                if words is not None:
                    way = ("network.io.direction", direction)
                    labels = (("hw.id", f"{card}:{port}"), ("hw.type", "network"), way)
                    moved = words * _WORD_BYTES
                    measurements.append(Measurement(catalog.HW_NETWORK_IO, moved, labels, boot_ns))
    return measurements
