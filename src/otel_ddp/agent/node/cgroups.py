"""Finds the cgroups (version 2) that limit the memory of the training on this node."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.node.source import KernelFiles


class Group(NamedTuple):
    """The folders of a cgroup and of its highest ancestor that this process can see."""

    path: str
    top: str

    def upward(self) -> Iterator[str]:
        """The folders of this cgroup and its ancestors."""
        path = self.path
        yield path
        while path != self.top and len(path) > 1:
            path = os.path.dirname(path)
            yield path


class _Mount(NamedTuple):
    top: str
    point: str


class Cgroups:
    """Finds the cgroups of processes. Mounts are read once, /proc/PID/cgroup at each call."""

    def __init__(
        self, files: KernelFiles, *, proc: Path = Path("/proc"), root: Path = Path("/")
    ) -> None:
        self._files = files
        self._proc = proc
        self._root = root
        self._mounts = files.read(f"{proc}/self/mountinfo", self._mounts_of) or []

    def group(self, pid: int | str) -> Group | None:
        """The cgroup of a process (or of `self`); None if unknown. Its folder may not exist."""
        path = self._files.read(f"{self._proc}/{pid}/cgroup", _of_process, "cgroup") or ""
        # A path with `..` belongs to a cgroup outside of our cgroup namespace, which we can't read.
        if not path.startswith("/") or ".." in path.split("/"):
            return None
        for mount in self._mounts:
            top = mount.top.rstrip("/")
            if path == top or path.startswith(f"{top}/"):
                below = path[len(top) :].rstrip("/")
                return Group(f"{mount.point}{below}", mount.point)
        return None

    def memory_limits(self, group: Group) -> Iterator[tuple[int, str]]:
        """The limits of this cgroup and its ancestors, in bytes, with their folders."""
        for path in group.upward():
            if limit := self._files.read(f"{path}/memory.max", _limit):
                yield limit, path

    def _mounts_of(self, text: str) -> list[_Mount]:
        found = []
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            fields = left.split(" ")
            if right.startswith("cgroup2 "):
                found.append(_Mount(fields[3], str(self._root / fields[4].lstrip("/"))))
        return found


def _of_process(text: str) -> str:
    return next((line[3:] for line in text.splitlines() if line.startswith("0::")), "")


def shared_limit(
    cgroups: Cgroups, pids: Collection[int | str], node_bytes: int | None
) -> tuple[int, str] | None:
    """The tightest memory limit of the cgroup that these processes share, and its folder.

    None if the processes may use all memory. A limit that only some of them have is ignored. Of
    equal limits the outermost counts, because all processes under it share it.
    """
    found = [group for each in pids if (group := cgroups.group(each)) is not None]
    if len({each.top for each in found}) != 1:
        return None
    shared = found[0]._replace(path=os.path.commonpath([each.path for each in found]))
    limits = [each for each in cgroups.memory_limits(shared) if each[0] < (node_bytes or math.inf)]
    return min(reversed(limits), key=itemgetter(0), default=None)


def _limit(text: str) -> int | None:
    return None if text.strip() == "max" else int(text)
