"""Reads the host: processors, memory, pressure, disks, network."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from otel_ddp.agent.node.cgroups import Cgroups, shared_limit
from otel_ddp.agent.node.source import KernelFiles, Measurement, boot_ns, numbers
from otel_ddp.vocabulary import catalog

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The mode of each column in /proc/stat; `user` and `nice` include the time of guests.
_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "interrupt", "steal")

SpentS = dict[str, float]
"""Seconds by mode."""


def _spent(text: str) -> SpentS:
    ticks = text.partition("\n")[0].split()[1:]
    spent_s = dict.fromkeys(_MODES, 0.0)
    for place, mode in enumerate(_MODES):
        spent_s[mode] += int(ticks[place]) / _TICKS_PER_S
    return spent_s


def _states_of_node(meminfo: str) -> dict[str, float]:
    """The bytes of memory in each state (used, cached, free); they add up to the node's memory."""
    node = _node_memory(meminfo)
    # The kernel counts shared memory, which holds the data loaders' batches, as cache. It cannot be
    # reclaimed, so we count it as used.
    cached = node["Cached"] + node["SReclaimable"] - node["Shmem"]
    states: dict[str, float] = {
        "free": node["MemFree"],
        "buffers": node["Buffers"],
        "cached": cached,
    }
    # At least 0: the kernel reads its counters one after the other, so their sum may exceed the
    # total.
    states["used"] = max(node["MemTotal"] - sum(states.values()), 0)
    return states


def _states_of_group(files: KernelFiles, limit_bytes: int, folder: str) -> dict[str, float]:
    charged = files.read(f"{folder}/memory.current", int)
    if charged is None:
        return {}
    # At least 0: the usage may exceed a limit for a moment, or after the limit was lowered.
    states: dict[str, float] = {"free": max(limit_bytes - charged, 0)}
    found = files.read(f"{folder}/memory.stat", numbers) or {}
    if "inactive_file" in found:
        # The kernel updates the two numbers separately, every two seconds, so they may disagree.
        states["cached"] = min(found["inactive_file"], charged)
        states["used"] = charged - states["cached"]
    return states


def _node_memory(text: str) -> dict[str, int]:
    """The values of /proc/meminfo in bytes, by the kernel's names."""
    return {name: kibibytes * 1024 for name, kibibytes in numbers(text).items()}


def _stalled(text: str) -> dict[str, float]:
    """Stalled seconds by kind of stall (`some`, `full`), from a pressure file."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0]: int(words[-1].removeprefix("total=")) / 1e6 for words in lines}


# -- bytes of disks, network interfaces and InfiniBand ports

_WORD_BYTES = 4
# The name that container runtimes give to a container's interface, which has no hardware.
_OF_CONTAINER = "eth0"


def _of_disks(vmstat: str) -> dict[str, int]:
    """Bytes that the node has read and written, as in `vmstat`, which doesn't count the bytes of a
    RAID again for its disks."""
    found = numbers(vmstat)
    return {"read": found["pgpgin"] * 1024, "write": found["pgpgout"] * 1024}


def _of_interfaces(files: KernelFiles, proc: Path, sys: Path) -> dict[str, int]:
    """Total bytes of interfaces with hardware, and of a container's own interface."""
    rows = files.read(f"{proc}/net/dev", _rows) or {}
    folder = f"{sys}/class/net"
    moved = [row for name, row in rows.items() if _is_counted(f"{folder}/{name}", name)]
    return dict(zip(("receive", "transmit"), map(sum, zip(*moved, strict=True)), strict=False))


def _is_counted(folder: str, name: str) -> bool:
    if name == _OF_CONTAINER:
        return True
    if not os.path.exists(f"{folder}/device"):
        return False  # a bond, bridge or VLAN: its bytes are counted at the hardware below it
    # In clouds (Azure, virtio failover), a device may have a master device that counts the same
    # bytes: count only the master.
    return not os.path.exists(f"{folder}/master/device")


def _rows(text: str) -> dict[str, tuple[int, int]]:
    """For each network interface: the bytes that it has received and sent."""
    lines = (line.rpartition(":") for line in text.splitlines())
    rows = {name.strip(): counts.split() for name, colon, counts in lines if colon}
    return {name: (int(row[0]), int(row[8])) for name, row in rows.items()}


def infiniband(files: KernelFiles, sys: Path, boot_ns: int) -> list[Measurement]:
    """Bytes of each InfiniBand and RoCE port. The counters of network interfaces do not include
    them, since they omit RDMA traffic."""
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


# -- the reader


class Host:
    """Reads the host. If a cgroup limits the memory, it reads the cgroup's memory and pressure."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        sys: Path = Path("/sys"),
        root: Path = Path("/"),
        boot_ns: Callable[[], int] = boot_ns,
        pids: Callable[[], Collection[int | str]] = lambda: ("self",),
    ) -> None:
        """*pids*: returns the processes whose common memory limit counts as the node's memory."""
        self._files = KernelFiles()
        self._proc, self._sys = proc, sys
        self._cgroups = Cgroups(self._files, proc=proc, root=root)
        self._pids = pids
        # The CPU time that the node had used at the last read, by mode.
        self._before: SpentS | None = None
        self._boot_ns = boot_ns()

    def read(self) -> list[Measurement]:
        node = self._files.read(f"{self._proc}/meminfo", _node_memory) or {}
        # Find the limit at each read, since limits and cgroups change.
        limit = shared_limit(self._cgroups, self._pids(), node.get("MemTotal"))
        moved = self._files.read(f"{self._proc}/vmstat", _of_disks)
        return [
            *self._shares(),
            *self._memory(node.get("MemTotal"), limit),
            *self._pressure(limit[1] if limit else ""),
            *self._moved(catalog.SYSTEM_DISK_IO, moved),
            *self._moved(
                catalog.SYSTEM_NETWORK_IO, _of_interfaces(self._files, self._proc, self._sys)
            ),
            *infiniband(self._files, self._sys, self._boot_ns),
        ]

    def _moved(self, metric: catalog.Metric, moved: Mapping[str, int] | None) -> list[Measurement]:
        """*moved*: the total bytes by direction, e.g. `read`."""
        (attribute,) = metric.attributes
        return [
            Measurement(metric, count, ((attribute, direction),), self._boot_ns)
            for direction, count in (moved or {}).items()
        ]

    def _shares(self) -> list[Measurement]:
        """Shares of the CPU time since the last read; none at the first read."""
        spent_s = self._files.read(f"{self._proc}/stat", _spent)
        before_s, self._before = self._before, spent_s
        if spent_s is None or before_s is None:
            return []
        # By the kernel's manual, idle time may decrease a little: count that as 0.
        passed_s = {mode: max(value - before_s[mode], 0.0) for mode, value in spent_s.items()}
        total_s = sum(passed_s.values())
        metric = catalog.SYSTEM_CPU_UTILIZATION
        return [
            Measurement(metric, value / total_s, (("cpu.mode", mode),))
            for mode, value in passed_s.items()
            if total_s > 0
        ]

    def _memory(self, node_bytes: int | None, limit: tuple[int, str] | None) -> list[Measurement]:
        if limit is not None:
            states = _states_of_group(self._files, *limit)
        else:
            states = self._files.read(f"{self._proc}/meminfo", _states_of_node) or {}
        measurements = [
            Measurement(catalog.SYSTEM_MEMORY_USAGE, value, (("system.memory.state", state),))
            for state, value in states.items()
        ]
        if limit_bytes := limit[0] if limit else node_bytes:
            measurements.append(Measurement(catalog.SYSTEM_MEMORY_LIMIT, limit_bytes))
        return measurements

    def _pressure(self, group: str) -> list[Measurement]:
        """Pressure stall times of the cgroup in this folder, if it has them, else of the node."""
        measurements: list[Measurement] = []
        for resource in ("cpu", "memory", "io"):
            path = f"{group}/{resource}.pressure"
            of_node = not group or not os.path.exists(path)
            if of_node:
                path = f"{self._proc}/pressure/{resource}"
            for stall_type, stalled_s in (self._files.read(path, _stalled) or {}).items():
                # Skip the node's `full` CPU pressure: it is undefined, and the kernel writes 0.
                if of_node and resource == "cpu" and stall_type == "full":
                    continue
                attributes = (("resource", resource), ("stall_type", stall_type))
                metric = catalog.OTEL_DDP_HOST_PRESSURE
                measurements.append(Measurement(metric, stalled_s, attributes, self._boot_ns))
        return measurements
