"""Reads what disks, interfaces and InfiniBand ports have moved, and how full file systems are."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.node.source import KernelFiles, Measurement, number
from otel_ddp.vocabulary import catalog

# Hardware, but no disks: drives for media, and parts of a flash chip.
_NO_DISK = re.compile(r"(sr|fd)\d+|mmcblk\d+(boot\d+|rpmb)|mtdblock\d+")
# The unit of /proc/diskstats, whatever the sectors of the disk.
_SECTOR_BYTES = 512
_WORD_BYTES = 4
_OF_A_PORT = ("port_rcv_data", "port_xmit_data")
# What container runtimes call a container's own interface, which has no hardware behind it.
_OF_CONTAINER = "eth0"


class _Counter(NamedTuple):
    """One of the words about a device."""

    metric: catalog.Metric
    direction: str
    column: int
    unit: int = 1


class _Devices:
    """Devices of one kind. Which of them count is decided anew when others are there."""

    kind = ""
    most = 32
    counters: tuple[_Counter, ...] = ()

    def __init__(self, files: KernelFiles, path: str, folder: str) -> None:
        """*path*: what the kernel counts. *folder*: what it knows of each device."""
        self._files = files
        self._path = path
        self._folder = folder
        self._seen: list[str] = []
        self._chosen: list[str] = []

    def read(self, boot_ns: int) -> list[Measurement]:
        rows = self._rows()
        if [*rows] != self._seen:
            self._seen = [*rows]
            chosen = self._choose(self._seen)
            if len(chosen) > self.most:
                self._files.leave_out(
                    self._path, f"only {self.most} of {len(chosen)} {self.kind} are measured"
                )
            self._chosen = chosen[: self.most]
        measurements = []
        for name in self._chosen:
            for metric, direction, column, unit in self.counters:
                word = rows[name][column] if len(rows[name]) > column else "nothing"
                if not word:
                    continue  # the device lacks this counter
                value = number(word)
                if value is None:
                    what = f"{word[:50]!r} is no {metric.name}"
                    self._files.leave_out(f"{self._path}, {name}", what)
                    continue
                identity, last = metric.attributes[0], (metric.attributes[-1], direction)
                kind = [("hw.type", "network")] if "hw.type" in metric.attributes else []
                attributes = ((identity, name), *kind, last)
                measurements.append(Measurement(metric, value * unit, attributes, boot_ns))
        return measurements

    def _rows(self) -> Mapping[str, list[str]]:
        raise NotImplementedError

    def _choose(self, names: list[str]) -> list[str]:
        return names

    def _lines(self) -> list[str]:
        return (self._files.text(self._path) or "").splitlines()


class Disks(_Devices):
    """Whole disks with hardware behind them.

    Partitions, RAIDs and logical volumes would count the same bytes again; loop, RAM and
    compressed disks are files and memory.
    """

    kind, most = "disks", 64
    counters = (
        _Counter(catalog.SYSTEM_DISK_IO, "read", 5, _SECTOR_BYTES),
        _Counter(catalog.SYSTEM_DISK_IO, "write", 9, _SECTOR_BYTES),
    )

    def _rows(self) -> Mapping[str, list[str]]:
        return {words[2]: words for line in self._lines() if len(words := line.split()) > 2}

    def _choose(self, names: list[str]) -> list[str]:
        return sorted(name for name in names if self._is_disk(name))

    def _is_disk(self, name: str) -> bool:
        folder = f"{self._folder}/{name.replace('/', '!')}"
        if _NO_DISK.fullmatch(name) or not os.path.exists(f"{folder}/device"):
            return False
        # A hidden one is one of several paths to an NVMe disk, which is counted itself.
        return (self._files.text(f"{folder}/hidden") or "").strip() != "1"


class Network(_Devices):
    """Interfaces with hardware behind them, and a container's own one."""

    kind = "interfaces"
    counters = (
        _Counter(catalog.SYSTEM_NETWORK_IO, "receive", 0),
        _Counter(catalog.SYSTEM_NETWORK_IO, "transmit", 8),
        _Counter(catalog.SYSTEM_NETWORK_ERRORS, "receive", 2),
        _Counter(catalog.SYSTEM_NETWORK_ERRORS, "transmit", 10),
    )

    def _rows(self) -> Mapping[str, list[str]]:
        lines = (line.rpartition(":") for line in self._lines())
        return {name.strip(): counts.split() for name, colon, counts in lines if colon}

    def _choose(self, names: list[str]) -> list[str]:
        return [name for name in names if name == _OF_CONTAINER or self._is_real(name)]

    def _is_real(self, name: str) -> bool:
        folder = f"{self._folder}/{name}"
        if not os.path.exists(f"{folder}/device"):
            return False  # a bond, a bridge or a VLAN: the devices below them are counted
        # Clouds put a second device below one that counts for both (Azure, virtio failover).
        if os.path.exists(f"{folder}/master/device"):
            return False
        # A switch in a network card shows a representor for each of its virtual functions.
        port = self._files.text(f"{folder}/phys_port_name") or ""
        return "vf" not in port and "sf" not in port


class Infiniband(_Devices):
    """Also ports on Ethernet (RoCE): a network interface does not count RDMA traffic."""

    kind = "ports"
    counters = (
        _Counter(catalog.HW_NETWORK_IO, "receive", 0, _WORD_BYTES),
        _Counter(catalog.HW_NETWORK_IO, "transmit", 1, _WORD_BYTES),
    )

    def _rows(self) -> Mapping[str, list[str]]:
        rows: dict[str, list[str]] = {}
        for card in sorted(self._files.names(self._folder)):
            for port in sorted(self._files.names(f"{self._folder}/{card}/ports")):
                counters = f"{self._folder}/{card}/ports/{port}/counters"
                texts = [self._files.text(f"{counters}/{name}") or "" for name in _OF_A_PORT]
                rows[f"{card}:{port}"] = [text.strip() for text in texts]
        return rows


def moving(files: KernelFiles, proc: Path, sys: Path) -> list[_Devices]:
    """All kinds of which something moves."""
    ports = f"{sys}/class/infiniband"
    return [
        Disks(files, f"{proc}/diskstats", f"{sys}/block"),
        Network(files, f"{proc}/net/dev", f"{sys}/class/net"),
        Infiniband(files, ports, ports),
    ]


_MOST_FILE_SYSTEMS = 16
# Data loaders pass their batches through shared memory, and die when it is full.
_SHARED_MEMORY = Path("/dev/shm")


class FileSystems:
    """Needs a thread of its own: a file server that does not answer blocks it for ever."""

    def __init__(
        self,
        directories: Callable[[], Iterable[Path]],
        *,
        always: Iterable[Path] | None = None,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
    ) -> None:
        self._directories = directories
        self._always = tuple(_always() if always is None else always)
        self._statvfs = statvfs
        self._files = KernelFiles()

    @property
    def errors(self) -> int:
        return self._files.errors

    def read(self) -> list[Measurement]:
        measurements: list[Measurement] = []
        seen: set[int] = set()
        # Sorted, so that a file system with several mount points always has the same one.
        for directory in (*self._always, *sorted(set(self._directories()))):
            try:
                device, point = _mount_point(directory)
                if device in seen:
                    continue
                if len(seen) == _MOST_FILE_SYSTEMS:
                    self._files.leave_out(
                        "/", f"only {_MOST_FILE_SYSTEMS} file systems are measured"
                    )
                    break
                seen.add(device)
                measurements += self._of_one(point)
            except OSError as error:
                self._files.failed(str(directory), error)
        return measurements

    def _of_one(self, point: str) -> list[Measurement]:
        found = self._statvfs(point)
        if not found.f_blocks:
            return []  # without storage, as /proc
        # As in `df`: blocks reserved for the superuser are neither used nor free.
        states = {"used": found.f_blocks - found.f_bfree, "free": found.f_bavail}
        # A path may be any bytes; a label is text.
        shown = ("system.filesystem.mountpoint", os.fsencode(point).decode("utf-8", "replace"))
        measurements = []
        for state, blocks in states.items():
            if not 0 <= blocks <= found.f_blocks:
                self._files.leave_out(point, f"{blocks} of {found.f_blocks} blocks are {state}")
                continue
            attributes = (shown, ("system.filesystem.state", state))
            size_bytes = blocks * found.f_frsize
            metric = catalog.SYSTEM_FILESYSTEM_USAGE
            measurements.append(Measurement(metric, size_bytes, attributes))
        return measurements


def _always() -> Iterator[Path]:
    yield Path("/")
    # There is none if nothing can be written, as in a container with a read-only root.
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir())
    yield _SHARED_MEMORY


def _mount_point(directory: Path) -> tuple[int, str]:
    """The device, and its highest directory above this one."""
    path = os.path.realpath(directory)
    device = os.stat(path).st_dev
    while (above := os.path.dirname(path)) != path and os.stat(above).st_dev == device:
        path = above
    return device, path
