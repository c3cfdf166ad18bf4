"""Finds the cgroups that limit the training on this node, or those of its container."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from operator import itemgetter
from typing import NamedTuple

from otel_ddp.agent.node.host.cgroup import Cgroups, Group
from otel_ddp.agent.node.kernel_files import KernelFiles, number

# In version 1 a cgroup without a limit has a number near 2^63.
_NO_LIMIT = 1 << 60


class MemoryShare(NamedTuple):
    """The cgroup whose memory counts as the node's."""

    path: str
    version: int
    limit_bytes: int | None


class ProcessorShare(NamedTuple):
    """The cgroup whose processor time counts as the node's."""

    path: str
    version: int
    cores: float


class Limits:
    """Found anew at each read: limits change, and processes move, at any time.

    The tightest limit counts; a wider one inside it never applies. Of equal limits the outermost
    counts, because all processes under it share it.
    """

    def __init__(
        self, files: KernelFiles, cgroups: Cgroups, pids: Callable[[], Collection[int | str]]
    ) -> None:
        """*pids*: the processes whose cgroups count."""
        self._files = files
        self._cgroups = cgroups
        self._pids = pids

    def _groups(self, controller: str) -> Iterator[Group]:
        """The cgroups that all processes share: a limit of one process is not the node's."""
        found = [[*self._cgroups.groups(each, controller)] for each in self._pids()]
        first, *others = [each for each in found if each] or [[]]
        for group in first:
            here = [
                next((each for each in of_one if each.top == group.top), None) for of_one in others
            ]
            paths = [group.path, *(each.path for each in here if each is not None)]
            if len(paths) == 1 + len(others):
                yield group._replace(path=os.path.commonpath(paths))

    def memory(self, node_bytes: int | None) -> MemoryShare | None:
        """None if the training may use all memory of the node."""
        for group in self._groups("memory"):
            name = "memory.limit_in_bytes" if group.version == 1 else "memory.max"
            found = [
                (limit, path)
                for path in group.upward()
                if (limit := self._memory_limit(f"{path}/{name}", node_bytes)) is not None
            ]
            if found:
                limit_bytes, path = min(reversed(found), key=itemgetter(0))
                return MemoryShare(path, group.version, limit_bytes)
            if group.in_container() and os.path.exists(f"{group.top}/{name}"):
                return MemoryShare(group.top, group.version, None)
        return None

    def processors(self, online: int) -> ProcessorShare | None:
        """None if the training may use all processors of the node."""
        found = [
            *self._limited("cpu", self._quota, online),
            *self._limited("cpuset", self._processor_set, online),
        ]
        if found:
            cores, group, path = min(reversed(found), key=itemgetter(0))
            return ProcessorShare(self._usage(group, path), group.version, cores)
        for group in self._groups("cpuacct"):
            if online and group.in_container():
                return ProcessorShare(group.top, group.version, online)
        return None

    def container(self) -> str:
        """The folder of the container's cgroup of version 2; empty if there is none."""
        for group in self._groups(""):
            if group.version == 2 and group.in_container():
                return group.top
        return ""

    def _memory_limit(self, file: str, node_bytes: int | None) -> int | None:
        text = (self._files.text(file) or "max").strip()
        if text == "max":
            return None
        limit = number(text)
        if not limit:
            self._files.leave_out(file, f"{text[:50]!r} is no limit")
            return None
        return limit if limit < (node_bytes or _NO_LIMIT) else None

    def _limited(
        self, controller: str, cores_of: Callable[[str, int], float | None], online: int
    ) -> Iterator[tuple[float, Group, str]]:
        """The cgroups that may use fewer than all processors."""
        for group in self._groups(controller):
            for path in group.upward():
                cores = cores_of(path, group.version)
                if cores is not None and cores < online:
                    yield cores, group, path

    def _quota(self, path: str, version: int) -> float | None:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        text = " ".join(self._files.text(f"{path}/{name}") or "" for name in names)
        words = text.split()
        if not words or words[0] in ("max", "-1"):
            return None
        numbers = [number(word) for word in words]
        if len(numbers) == 2 and numbers[0] and numbers[1]:
            return numbers[0] / numbers[1]
        self._files.leave_out(f"{path}/{names[0]}", f"{text[:50]!r} is no quota")
        return None

    def _processor_set(self, path: str, version: int) -> int | None:
        name = "cpuset.effective_cpus" if version == 1 else "cpuset.cpus.effective"
        text = (self._files.text(f"{path}/{name}") or "").strip()
        count = 0
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            low, high = number(first), number(last or first)
            if low is None or high is None or high < low:
                self._files.leave_out(f"{path}/{name}", f"{text[:50]!r} is no list")
                return None
            count += high - low + 1
        return count or None

    def _usage(self, group: Group, path: str) -> str:
        """Where a cgroup's processor time is accounted; version 1 has a separate tree for that."""
        if group.version == 1:
            for account in self._groups("cpuacct"):
                return account.top + path[len(group.top) :]
        return path
