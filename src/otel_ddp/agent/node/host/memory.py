"""Reads the memory of the node or the container, and the swap space."""

from __future__ import annotations

from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.host.limits import MemoryShare
from otel_ddp.agent.node.kernel_files import KernelFiles
from otel_ddp.agent.node.measurement import Measurement

_OF_NODE = ("MemTotal", "MemFree", "Buffers", "Cached", "SReclaimable", "Shmem")
_OF_SWAP = ("SwapTotal", "SwapFree")


class Memory:
    """Used, free, cached and buffers add up to the limit."""

    def __init__(self, files: KernelFiles, *, proc: Path = Path("/proc")) -> None:
        self._files = files
        self._path = f"{proc}/meminfo"

    def node(self) -> dict[str, int]:
        """The node's memory in bytes, by the kernel's names."""
        found = self._files.numbers(self._path, _OF_NODE + _OF_SWAP)
        return {name: kibibytes * 1024 for name, kibibytes in found.items()}

    def read(self, node: dict[str, int], share: MemoryShare | None) -> list[Measurement]:
        if share is None:
            limit_bytes = node.get("MemTotal")
            states = self._states_of_node(node)
        else:
            # Also in a container without a limit, the memory that it does not use counts as free.
            limit_bytes = share.limit_bytes or node.get("MemTotal")
            states = self._states_of_group(share, limit_bytes)
        measurements = [
            Measurement(catalog.SYSTEM_MEMORY_USAGE, value, (("system.memory.state", state),))
            for state, value in states.items()
        ]
        if limit_bytes:
            measurements.append(Measurement(catalog.SYSTEM_MEMORY_LIMIT, limit_bytes))
        return measurements + self._swap(node)

    def _states_of_node(self, node: dict[str, int]) -> dict[str, int]:
        names = {"free": "MemFree", "buffers": "Buffers"}
        states = {state: node[name] for state, name in names.items() if name in node}
        if {"Cached", "SReclaimable", "Shmem"} <= node.keys():
            # The kernel counts shared memory, which holds the data loaders' batches, as cache. But
            # it cannot be reclaimed, so it is in use; in a container too.
            states["cached"] = node["Cached"] + node["SReclaimable"] - node["Shmem"]
        if len(states) == 3 and "MemTotal" in node:
            states["used"] = node["MemTotal"] - sum(states.values())
        for state in [state for state, value in states.items() if value < 0]:
            self._files.leave_out(self._path, f"{state} memory would be negative")
            del states[state]
        return states

    def _states_of_group(self, share: MemoryShare, limit_bytes: int | None) -> dict[str, int]:
        if share.version == 1:
            usage_file, inactive = "memory.usage_in_bytes", "total_inactive_file"
        else:
            usage_file, inactive = "memory.current", "inactive_file"
        charged = self._files.value(f"{share.path}/{usage_file}")
        if charged is None:
            return {}
        states = {}
        found = self._files.numbers(f"{share.path}/memory.stat", (inactive,))
        if inactive in found:
            # The kernel updates these two numbers separately, every two seconds.
            states["cached"] = min(found[inactive], charged)
            states["used"] = charged - states["cached"]
        if limit_bytes:
            # Usage may exceed a limit for a moment, and for longer after it is lowered.
            states["free"] = max(limit_bytes - charged, 0)
        return states

    def _swap(self, node: dict[str, int]) -> list[Measurement]:
        total, free = node.get("SwapTotal"), node.get("SwapFree")
        if not total or free is None:
            return []
        if free > total:
            self._files.leave_out(self._path, "more swap space is free than there is")
            return []
        return [
            Measurement(catalog.SYSTEM_PAGING_USAGE, value, (("system.paging.state", state),))
            for state, value in (("used", total - free), ("free", free))
        ]
