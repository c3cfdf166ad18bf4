"""Reads how long tasks were stalled by a lack of processors, memory or storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.kernel_files import KernelFiles, number
from otel_ddp.agent.node.measurement import Measurement

RESOURCES = ("cpu", "memory", "io")


class Pressure:
    """The pressure of the container, if its cgroup has the files; otherwise of the node."""

    def __init__(self, files: KernelFiles, *, proc: Path = Path("/proc")) -> None:
        self._files = files
        self._node = f"{proc}/pressure"

    def read(self, groups: Mapping[str, str], boot_ns: int) -> list[Measurement]:
        """*groups*: resource -> folder of its cgroup; empty for the node."""
        measurements: list[Measurement] = []
        for resource in RESOURCES:
            group = groups.get(resource, "")
            path = f"{group}/{resource}.pressure"
            if not group or not os.path.exists(path):
                group, path = "", f"{self._node}/{resource}"
            for line in (self._files.text(path) or "").splitlines():
                stall_type, _, rest = line.partition(" ")
                # Never do all tasks of a node wait for a processor: the kernel writes 0 there.
                if resource == "cpu" and stall_type == "full" and not group:
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
