"""Finds the cgroups (version 2) that limit the training on this node, and their limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.node.source import KernelFiles

_LIMIT = "memory.max"


class Group(NamedTuple):
    """A cgroup, and its highest visible ancestor."""

    path: str
    top: str

    def upward(self) -> Iterator[str]:
        """The folders of this cgroup and its ancestors."""
        path = self.path
        yield path
        while path != self.top and len(path) > 1:
            path = os.path.dirname(path)
            yield path

    def in_container(self) -> bool:
        """Whether the highest visible cgroup is a container's: the machine's lacks this file."""
        return os.path.exists(f"{self.top}/cgroup.events")


class _Mount(NamedTuple):
    top: str
    point: str


class Cgroups:
    """The mounted trees. They are read once, the cgroup of a process each time."""

    def __init__(
        self, files: KernelFiles, *, proc: Path = Path("/proc"), root: Path = Path("/")
    ) -> None:
        self._files = files
        self._proc = proc
        self._root = root
        self._mounts = files.read(f"{proc}/self/mountinfo", self._mounts_of) or []

    def group(self, pid: int | str) -> Group | None:
        """The cgroup of a process (or `self`), whose files may be missing."""
        path = self._files.read(f"{self._proc}/{pid}/cgroup", _of_process, "cgroup") or ""
        # A path with dots is outside this namespace.
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
            if limit := self._files.read(f"{path}/{_LIMIT}", _limit):
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


class Share(NamedTuple):
    """The cgroup whose memory or CPU time counts as the node's."""

    path: str
    limit: float | None
    """In bytes or cores; None for a container without a limit."""


class Limits:
    """The tightest limits of the training, found at each read, since limits and cgroups change.

    Of equal limits the outermost counts, because all processes under it share it.
    """

    def __init__(
        self, files: KernelFiles, cgroups: Cgroups, pids: Callable[[], Collection[int | str]]
    ) -> None:
        """*pids*: the processes whose cgroups count."""
        self._files = files
        self._cgroups = cgroups
        self._pids = pids

    def _group(self) -> Group | None:
        """The cgroup that all processes share: a limit of a single one is not the node's."""
        found = [group for each in self._pids() if (group := self._cgroups.group(each)) is not None]
        if len({each.top for each in found}) != 1:
            return None
        return found[0]._replace(path=os.path.commonpath([each.path for each in found]))

    def memory(self, node_bytes: int | None) -> Share | None:
        """None if the training may use all memory."""
        return self._tightest({_LIMIT: _limit}, node_bytes)

    def processors(self, online: int) -> Share | None:
        """None if the training may use all processors."""
        return self._tightest({"cpu.max": _quota, "cpuset.cpus.effective": _count}, online)

    def _tightest(
        self, files: Mapping[str, Callable[[str], float | None]], whole: float | None
    ) -> Share | None:
        if (group := self._group()) is None:
            return None
        found = [
            (limit, path)
            for path in group.upward()
            for limit in (self._files.read(f"{path}/{name}", files[name]) for name in files)
            if limit and (whole is None or limit < whole)
        ]
        if found:
            limit, path = min(reversed(found), key=itemgetter(0))
            return Share(path, limit)
        return Share(group.top, None) if group.in_container() else None


def _limit(text: str) -> int | None:
    return None if text.strip() == "max" else int(text)


def _quota(text: str) -> float | None:
    """In cores."""
    quota, period = text.split()
    return None if quota == "max" else int(quota) / int(period)


def _count(text: str) -> float:
    """The number of processors in a list such as `0,2-3`."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
