"""Reads the node: processors, memory, pressure, disks, network. Not file systems: they may hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.host import traffic
from otel_ddp.agent.node.host.cgroup import Cgroups
from otel_ddp.agent.node.host.limits import Limits
from otel_ddp.agent.node.host.memory import Memory
from otel_ddp.agent.node.host.processors import Processors
from otel_ddp.agent.node.kernel_files import KernelFiles, number
from otel_ddp.agent.node.measurement import Measurement, boot_ns
from otel_ddp.errors import containment


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
        load: Callable[[], tuple[float, float, float]] = os.getloadavg,
        pids: Callable[[], Collection[int | str]] = lambda: ("self",),
    ) -> None:
        """*pids*: the processes whose common limits count as the node's."""
        self._files = KernelFiles()
        self._proc = proc
        self._cores = cores
        self._load = load
        self._limits = Limits(self._files, Cgroups(self._files, proc=proc, root=root), pids)
        self._processors = Processors(self._files, proc=proc, clock=clock)
        self._memory = Memory(self._files, proc=proc)
        self._devices = traffic.devices(self._files, proc, sys)
        self._boot_ns = boot_ns()

    @property
    def errors(self) -> int:
        """How many numbers were left out so far."""
        return self._files.errors

    def read(self) -> list[Measurement]:
        parts = (self._from_limits, self._load_average, *(each.read for each in self._devices))
        return [measurement for part in parts for measurement in self._part(part)]

    @containment.contained(default=())
    def _part(self, read: Callable[[int], list[Measurement]]) -> list[Measurement]:
        return read(self._boot_ns)

    def _from_limits(self, boot_ns: int) -> list[Measurement]:
        online = self._cores() or 0
        node = self._memory.node()
        memory = self._limits.memory(node.get("MemTotal"))
        processors = self._limits.processors(online)
        container = self._limits.container()
        of_memory = memory.path if memory and memory.version == 2 else container
        of_processors = processors.path if processors and processors.version == 2 else container
        groups = {"cpu": of_processors, "memory": of_memory, "io": of_memory}
        return [
            *self._processors.read(processors, online),
            *self._memory.read(node, memory),
            *self._pressure(groups, boot_ns),
        ]

    def _load_average(self, _: int) -> list[Measurement]:
        try:
            return [Measurement(catalog.OTEL_DDP_HOST_LOAD_AVERAGE_1M, self._load()[0])]
        except OSError as error:
            self._files.failed("the load average", error)
            return []

    def _pressure(self, groups: Mapping[str, str], boot_ns: int) -> list[Measurement]:
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
                measurements.append(
                    Measurement(catalog.OTEL_DDP_HOST_PRESSURE, total_us / 1e6, attributes, boot_ns)
                )
        return measurements
