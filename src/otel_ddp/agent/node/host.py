"""Reads the host: processors, memory, pressure, disks, network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from otel_ddp.agent.node.cgroups import Cgroups, Limits, Share
from otel_ddp.agent.node.source import KernelFiles, Measurement, boot_ns, numbers
from otel_ddp.vocabulary import catalog

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# In the order of /proc/stat; `user` and `nice` include the time of guests.
_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "interrupt", "steal")

SpentS = dict[str, float]
"""Seconds by mode."""


def _of_group(text: str) -> SpentS:
    found = numbers(text)
    return {mode: found[f"{mode}_usec"] / 1e6 for mode in ("user", "system")}


def _of_node(text: str) -> SpentS:
    ticks = text.partition("\n")[0].split()[1:]
    spent_s = dict.fromkeys(_MODES, 0.0)
    for place, mode in enumerate(_MODES):
        spent_s[mode] += int(ticks[place]) / _TICKS_PER_S
    return spent_s


def _states_of_node(meminfo: str) -> dict[str, float]:
    """Bytes by state, which add up to the limit."""
    node = _node_memory(meminfo)
    # The kernel counts shared memory, which holds the data loaders' batches, as cache. It cannot be
    # reclaimed, so we count it as used.
    cached = node["Cached"] + node["SReclaimable"] - node["Shmem"]
    states: dict[str, float] = {
        "free": node["MemFree"],
        "buffers": node["Buffers"],
        "cached": cached,
    }
    # The kernel counts each state separately.
    states["used"] = max(node["MemTotal"] - sum(states.values()), 0)
    return states


def _states_of_group(
    files: KernelFiles, share: Share, limit_bytes: float | None
) -> dict[str, float]:
    charged = files.read(f"{share.path}/memory.current", int)
    if charged is None:
        return {}
    states: dict[str, float] = {}
    found = files.read(f"{share.path}/memory.stat", numbers) or {}
    if "inactive_file" in found:
        # The kernel updates the two numbers separately, every two seconds.
        states["cached"] = min(found["inactive_file"], charged)
        states["used"] = charged - states["cached"]
    if limit_bytes:
        # Usage may exceed a limit for a moment, or after it is lowered.
        states["free"] = max(limit_bytes - charged, 0)
    return states


def _node_memory(text: str) -> dict[str, int]:
    """Bytes by the kernel's names."""
    return {name: kibibytes * 1024 for name, kibibytes in numbers(text).items()}


def _stalled(text: str) -> dict[str, float]:
    """Seconds by kind of stall."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0]: int(words[-1].removeprefix("total=")) / 1e6 for words in lines}


# -- bytes of disks, network interfaces and InfiniBand ports

_WORD_BYTES = 4
# A container's own interface, as runtimes call it; it has no hardware.
_OF_CONTAINER = "eth0"


def _of_disks(vmstat: str) -> dict[str, int]:
    """The kernel's total, as in `vmstat`: a RAID and its disks count once."""
    found = numbers(vmstat)
    return {"read": found["pgpgin"] * 1024, "write": found["pgpgout"] * 1024}


def _of_interfaces(files: KernelFiles, proc: Path, sys: Path) -> dict[str, int]:
    """Totals of interfaces with hardware, and of a container's own one."""
    rows = files.read(f"{proc}/net/dev", _rows) or {}
    folder = f"{sys}/class/net"
    moved = [row for name, row in rows.items() if _is_counted(files, f"{folder}/{name}", name)]
    return dict(zip(("receive", "transmit"), map(sum, zip(*moved, strict=True)), strict=False))


def _is_counted(files: KernelFiles, folder: str, name: str) -> bool:
    if name == _OF_CONTAINER:
        return True
    if not os.path.exists(f"{folder}/device"):
        return False  # a bond, bridge or VLAN, whose devices are counted
    # In clouds the master of two devices counts for both (Azure, virtio failover).
    if os.path.exists(f"{folder}/master/device"):
        return False
    # Representors of virtual functions in a switching network card.
    port = files.read(f"{folder}/phys_port_name", str) or ""
    return "vf" not in port and "sf" not in port


def _rows(text: str) -> dict[str, tuple[int, int]]:
    """By interface: bytes received and sent."""
    lines = (line.rpartition(":") for line in text.splitlines())
    rows = {name.strip(): counts.split() for name, colon, counts in lines if colon}
    return {name: (int(row[0]), int(row[8])) for name, row in rows.items()}


def infiniband(files: KernelFiles, sys: Path, boot_ns: int) -> list[Measurement]:
    """Each port, also RoCE: network interfaces do not count RDMA traffic."""
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
    """Under a cgroup's limit, or in a container, processors and memory are the cgroup's."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        sys: Path = Path("/sys"),
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        boot_ns: Callable[[], int] = boot_ns,
        cores: Callable[[], int | None] = os.cpu_count,
        pids: Callable[[], Collection[int | str]] = lambda: ("self",),
    ) -> None:
        """*pids*: processes whose common limits count as the node's."""
        self._files = KernelFiles()
        self._proc, self._sys = proc, sys
        self._meminfo, self._vmstat = f"{proc}/meminfo", f"{proc}/vmstat"
        self._cores = cores
        self._limits = Limits(self._files, Cgroups(self._files, proc=proc, root=root), pids)
        self._clock = clock
        # The cgroup, the time, and the CPU time at the last read.
        self._before: tuple[str, float, SpentS] | None = None
        self._boot_ns = boot_ns()

    def read(self) -> list[Measurement]:
        online = self._cores() or 0
        node = self._files.read(self._meminfo, _node_memory) or {}
        node_bytes = node.get("MemTotal")
        memory = self._limits.memory(node_bytes)
        processors = self._limits.processors(online)
        of_processors = processors.path if processors else ""
        of_memory = memory.path if memory else ""
        groups = {"cpu": of_processors, "memory": of_memory, "io": of_memory}
        return [
            *self._shares(processors, online),
            *self._memory(node_bytes, memory),
            *self._pressure(groups),
            *self._moved(catalog.SYSTEM_DISK_IO, self._files.read(self._vmstat, _of_disks)),
            *self._moved(
                catalog.SYSTEM_NETWORK_IO, _of_interfaces(self._files, self._proc, self._sys)
            ),
            *infiniband(self._files, self._sys, self._boot_ns),
        ]

    def _moved(self, metric: catalog.Metric, moved: Mapping[str, int] | None) -> list[Measurement]:
        """*moved*: bytes by direction."""
        (attribute,) = metric.attributes
        return [
            Measurement(metric, count, ((attribute, direction),), self._boot_ns)
            for direction, count in (moved or {}).items()
        ]

    def _shares(self, share: Share | None, online: int) -> list[Measurement]:
        """Shares of the CPU time since the last read; none at the first one."""
        now_s, cgroup = self._clock(), share.path if share else ""
        if share:
            spent_s = self._files.read(f"{share.path}/cpu.stat", _of_group)
        else:
            spent_s = self._files.read(f"{self._proc}/stat", _of_node)
        if spent_s is None:
            return []
        before, self._before = self._before, (cgroup, now_s, spent_s)
        if before is None or before[0] != cgroup:
            return []
        # Idle time may decrease a little, says the kernel's manual.
        passed_s = {mode: max(value - before[2][mode], 0.0) for mode, value in spent_s.items()}
        if share:
            # Bursts may exceed a quota for a moment.
            free_s = (now_s - before[1]) * (share.limit or online) - sum(passed_s.values())
            passed_s["idle"] = max(free_s, 0.0)
        total_s = sum(passed_s.values())
        metric = catalog.SYSTEM_CPU_UTILIZATION
        return [
            Measurement(metric, value / total_s, (("cpu.mode", mode),))
            for mode, value in passed_s.items()
            if total_s > 0
        ]

    def _memory(self, node_bytes: int | None, share: Share | None) -> list[Measurement]:
        # In a container without a limit, the rest of the node's memory is free.
        limit_bytes = (share and share.limit) or node_bytes
        if share is not None:
            states = _states_of_group(self._files, share, limit_bytes)
        else:
            states = self._files.read(self._meminfo, _states_of_node) or {}
        measurements = [
            Measurement(catalog.SYSTEM_MEMORY_USAGE, value, (("system.memory.state", state),))
            for state, value in states.items()
        ]
        if limit_bytes:
            measurements.append(Measurement(catalog.SYSTEM_MEMORY_LIMIT, limit_bytes))
        return measurements

    def _pressure(self, groups: Mapping[str, str]) -> list[Measurement]:
        """Pressure stall times of the cgroup, if it has them, else of the node.

        *groups*: by resource, the folder of a cgroup; empty for the node.
        """
        measurements: list[Measurement] = []
        for resource, group in groups.items():
            path = f"{group}/{resource}.pressure"
            of_node = not group or not os.path.exists(path)
            if of_node:
                path = f"{self._proc}/pressure/{resource}"
            for stall_type, stalled_s in (self._files.read(path, _stalled) or {}).items():
                # Undefined for a whole node: the kernel writes 0.
                if of_node and resource == "cpu" and stall_type == "full":
                    continue
                attributes = (("resource", resource), ("stall_type", stall_type))
                metric = catalog.OTEL_DDP_HOST_PRESSURE
                measurements.append(Measurement(metric, stalled_s, attributes, self._boot_ns))
        return measurements
