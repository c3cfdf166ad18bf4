"""Reads the node: processors, memory, pressure, disks, network. Not file systems: they may hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from otel_ddp.agent.node.host.cgroup import Cgroups
from otel_ddp.agent.node.host.disks import Disks
from otel_ddp.agent.node.host.infiniband import Infiniband
from otel_ddp.agent.node.host.limits import Limits
from otel_ddp.agent.node.host.memory import Memory
from otel_ddp.agent.node.host.network import Network
from otel_ddp.agent.node.host.pressure import Pressure
from otel_ddp.agent.node.host.processors import Processors, read_processor_times
from otel_ddp.agent.node.kernel_files import KernelFiles
from otel_ddp.agent.node.measurement import Measurement
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
        pids: Callable[[], Collection[int | str]] = lambda: ("self",),
    ) -> None:
        """*pids*: the processes whose common limits count as the node's."""
        self._files = KernelFiles()
        self._proc = proc
        self._limits = Limits(self._files, Cgroups(self._files, proc=proc, root=root), pids)
        self._processors = Processors(self._files, proc=proc, clock=clock)
        self._memory = Memory(self._files, proc=proc)
        self._disks = Disks(self._files, proc=proc, sys=sys)
        self._network = Network(self._files, proc=proc, sys=sys)
        self._infiniband = Infiniband(self._files, sys=sys)
        self._pressure = Pressure(self._files, proc=proc)
        self._boot_ns = 0

    @property
    def errors(self) -> int:
        """How many numbers were left out so far."""
        return self._files.errors

    def read(self) -> list[Measurement]:
        return [
            *self._from_limits(),
            *self._part(self._disks.read),
            *self._part(self._network.read),
            *self._part(self._infiniband.read),
        ]

    @containment.contained(default=())
    def _from_limits(self) -> list[Measurement]:
        times = read_processor_times(self._files, self._proc)
        # The kernel computes it anew each time, to the second; a counter's start must not move.
        self._boot_ns = self._boot_ns or times.boot_ns
        node = self._memory.node()
        memory = self._limits.memory(node.get("MemTotal"))
        processors = self._limits.processors(times.online)
        container = self._limits.container()
        of_memory = memory.path if memory and memory.version == 2 else container
        of_processors = processors.path if processors and processors.version == 2 else container
        groups = {"cpu": of_processors, "memory": of_memory, "io": of_memory}
        return [
            *self._processors.read(times, processors),
            *self._memory.read(node, memory),
            *self._pressure.read(groups, self._boot_ns),
        ]

    @containment.contained(default=())
    def _part(self, read: Callable[[int], list[Measurement]]) -> list[Measurement]:
        return read(self._boot_ns)
