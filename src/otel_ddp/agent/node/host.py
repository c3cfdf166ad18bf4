"""Reads the node: processors, memory, pressure, disks, network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from otel_ddp.agent.node.cgroups import Cgroups, Limits, Share
from otel_ddp.agent.node.devices import Disks, Infiniband, Network
from otel_ddp.agent.node.source import KernelFiles, Measurement, boot_ns, number
from otel_ddp.errors import contained
from otel_ddp.vocabulary import catalog

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# In the order of /proc/stat; `user` and `nice` include the time of guests.
_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "interrupt", "steal")

SpentS = dict[str, float]
"""Seconds by mode."""


class Processors:
    """Shares of the time since the last read; the first one returns none."""

    def __init__(
        self,
        files: KernelFiles,
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._path = f"{proc}/stat"
        self._clock = clock
        # The cgroup, the moment, and what was spent by then.
        self._before: tuple[str, float, SpentS] | None = None

    def read(self, share: Share | None, online: int) -> list[Measurement]:
        now_s, cgroup = self._clock(), share.path if share else ""
        spent_s = self._spent_in(share) if share else self._spent_on_node()
        if not spent_s:
            return []
        before, self._before = self._before, (cgroup, now_s, spent_s)
        if before is None or before[0] != cgroup:
            return []
        # By the kernel's manual idle time may go back a little.
        passed_s = {mode: max(value - before[2][mode], 0.0) for mode, value in spent_s.items()}
        if share:
            # Quotas come in slices and can be saved up: usage may exceed them for a moment.
            free_s = (now_s - before[1]) * (share.limit or online) - sum(passed_s.values())
            passed_s["idle"] = max(free_s, 0.0)
        total_s = sum(passed_s.values())
        metric = catalog.SYSTEM_CPU_UTILIZATION
        return [
            Measurement(metric, value / total_s, (("cpu.mode", mode),))
            for mode, value in passed_s.items()
            if total_s > 0
        ]

    def _spent_in(self, share: Share) -> SpentS | None:
        found = self._files.numbers(f"{share.path}/cpu.stat", ("user_usec", "system_usec"))
        spent_s = {name.removesuffix("_usec"): value / 1e6 for name, value in found.items()}
        return spent_s if len(spent_s) == 2 else None

    def _spent_on_node(self) -> SpentS | None:
        text = self._files.text(self._path)
        if text is None:
            return None
        name, *words = text.partition("\n")[0].split() or [""]
        ticks = [number(word) for word in words[: len(_MODES)]]
        spent_s = dict.fromkeys(_MODES, 0.0)
        for mode, value in zip(_MODES, ticks, strict=False):
            spent_s[mode] += (value or 0) / _TICKS_PER_S
        if name != "cpu" or len(ticks) < len(_MODES) or None in ticks:
            self._files.leave_out(self._path, "it does not begin with the times of all processors")
            return None
        return spent_s


_OF_NODE = ("MemTotal", "MemFree", "Buffers", "Cached", "SReclaimable", "Shmem")
# By the version of cgroups: the file of what is charged, and its part that can be given back.
_OF_GROUP = {
    1: ("memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.current", "inactive_file"),
}


class Memory:
    """Used, free, cached and buffers add up to the limit."""

    def __init__(self, files: KernelFiles, *, proc: Path = Path("/proc")) -> None:
        self._files = files
        self._path = f"{proc}/meminfo"

    def node(self) -> dict[str, int]:
        """The node's memory in bytes, by the kernel's names."""
        found = self._files.numbers(self._path, _OF_NODE)
        return {name: kibibytes * 1024 for name, kibibytes in found.items()}

    def read(self, node: dict[str, int], share: Share | None) -> list[Measurement]:
        if share is None:
            limit_bytes: float | None = node.get("MemTotal")
            states = self._states_of_node(node)
        else:
            # Also in a container without a limit, the memory that it does not use counts as free.
            limit_bytes = share.limit or node.get("MemTotal")
            states = self._states_of_group(share, limit_bytes)
        measurements = [
            Measurement(catalog.SYSTEM_MEMORY_USAGE, value, (("system.memory.state", state),))
            for state, value in states.items()
        ]
        if limit_bytes:
            measurements.append(Measurement(catalog.SYSTEM_MEMORY_LIMIT, limit_bytes))
        return measurements

    def _states_of_node(self, node: dict[str, int]) -> dict[str, float]:
        if not node.keys() >= set(_OF_NODE):
            return {}
        # The kernel counts shared memory, which holds the data loaders' batches, as cache. But it
        # cannot be reclaimed, so it is in use; in a container too.
        cached = node["Cached"] + node["SReclaimable"] - node["Shmem"]
        states: dict[str, float] = {
            "free": node["MemFree"],
            "buffers": node["Buffers"],
            "cached": cached,
        }
        # The kernel counts each of them for itself.
        states["used"] = max(node["MemTotal"] - sum(states.values()), 0)
        return states

    def _states_of_group(self, share: Share, limit_bytes: float | None) -> dict[str, float]:
        usage_file, inactive = _OF_GROUP[share.version]
        charged = self._files.value(f"{share.path}/{usage_file}")
        if charged is None:
            return {}
        states: dict[str, float] = {}
        found = self._files.numbers(f"{share.path}/memory.stat", (inactive,))
        if inactive in found:
            # The kernel updates these two numbers separately, every two seconds.
            states["cached"] = min(found[inactive], charged)
            states["used"] = charged - states["cached"]
        if limit_bytes:
            # Usage may exceed a limit for a moment, and for longer after it is lowered.
            states["free"] = max(limit_bytes - charged, 0)
        return states


class Host:
    """In a container, or under a cgroup's limit, processors and memory are those of the cgroup."""

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
        """*pids*: the processes whose common limits count as the node's."""
        self._files = KernelFiles()
        self._proc = proc
        self._cores = cores
        self._limits = Limits(self._files, Cgroups(self._files, proc=proc, root=root), pids)
        self._processors = Processors(self._files, proc=proc, clock=clock)
        self._memory = Memory(self._files, proc=proc)
        self._boot_ns = boot_ns()
        self._devices = (
            Disks(self._files, f"{proc}/diskstats", f"{sys}/block", self._boot_ns),
            Network(self._files, f"{proc}/net/dev", f"{sys}/class/net", self._boot_ns),
            Infiniband(self._files, sys, self._boot_ns),
        )

    @property
    def errors(self) -> int:
        """How many numbers were left out so far."""
        return self._files.errors

    def read(self) -> list[Measurement]:
        parts = (self._from_limits, *(each.read for each in self._devices))
        return [measurement for part in parts for measurement in self._part(part)]

    @contained(default=())
    def _part(self, read: Callable[[], list[Measurement]]) -> list[Measurement]:
        return read()

    def _from_limits(self) -> list[Measurement]:
        online = self._cores() or 0
        node = self._memory.node()
        memory = self._limits.memory(node.get("MemTotal"))
        processors = self._limits.processors(online)
        of_processors = processors.path if processors else ""
        of_memory = memory.path if memory and memory.version == 2 else self._limits.container()
        groups = {"cpu": of_processors, "memory": of_memory, "io": of_memory}
        return [
            *self._processors.read(processors, online),
            *self._memory.read(node, memory),
            *self._pressure(groups),
        ]

    def _pressure(self, groups: Mapping[str, str]) -> list[Measurement]:
        """How long tasks were stalled: of the container, if its cgroup says it, or of the node.

        *groups*: resource -> folder of its cgroup; empty for the node.
        """
        measurements: list[Measurement] = []
        for resource, group in groups.items():
            path = f"{group}/{resource}.pressure"
            of_node = not group or not os.path.exists(path)
            if of_node:
                path = f"{self._proc}/pressure/{resource}"
            for line in (self._files.text(path) or "").splitlines():
                stall_type, _, rest = line.partition(" ")
                # Never do all tasks of a node wait for a processor: the kernel writes 0 there.
                if of_node and resource == "cpu" and stall_type == "full":
                    continue
                total_us = number(rest.rpartition("total=")[2])
                if stall_type not in ("some", "full") or total_us is None:
                    self._files.leave_out(path, f"{line[:50]!r} was not understood")
                    continue
                attributes = (("resource", resource), ("stall_type", stall_type))
                metric, stalled_s = catalog.OTEL_DDP_HOST_PRESSURE, total_us / 1e6
                measurements.append(Measurement(metric, stalled_s, attributes, self._boot_ns))
        return measurements
