"""Finds the cgroups that limit the training on this node, versions 1 and 2, and their limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.node.source import KernelFiles


class Group(NamedTuple):
    """A cgroup, and the highest one above it that is visible here."""

    path: str
    top: str
    version: int

    def upward(self) -> Iterator[str]:
        """The folders of this cgroup and of those above it."""
        path = self.path
        yield path
        while path != self.top and len(path) > 1:
            path = os.path.dirname(path)
            yield path

    @property
    def limit_name(self) -> str:
        """The file with its memory limit."""
        return "memory.limit_in_bytes" if self.version == 1 else "memory.max"

    def in_container(self) -> bool:
        """Whether the highest visible cgroup is a container's: only the machine's lacks this file.

        Of version 1 all lack it.
        """
        return os.path.exists(f"{self.top}/cgroup.events")


class _Mount(NamedTuple):
    version: int
    controllers: frozenset[str]
    top: str
    point: str


class Cgroups:
    """The mounted trees, read once; the cgroup of a process is read each time."""

    def __init__(
        self, files: KernelFiles, *, proc: Path = Path("/proc"), root: Path = Path("/")
    ) -> None:
        self._files = files
        self._proc = proc
        self._root = root
        mounts = files.read(f"{proc}/self/mountinfo", self._mounts_of) or []
        # A hybrid machine has both, version 2 without controllers: so version 1 comes first.
        self._mounts = sorted(mounts, key=lambda mount: mount.version)

    def groups(self, pid: int | str, controller: str) -> Iterator[Group]:
        """The cgroups that may control a process (or `self`); their files may be missing."""
        inner = self._files.read(f"{self._proc}/{pid}/cgroup", _by_controller, "cgroup") or {}
        for mount in self._mounts:
            if mount.version == 1 and controller not in mount.controllers:
                continue
            path = inner.get(controller if mount.version == 1 else "", "")
            # A path with dots leaves the part of the tree that this namespace shows.
            if not path.startswith("/") or ".." in path.split("/"):
                continue
            top = mount.top.rstrip("/")
            if path == top or path.startswith(f"{top}/"):
                below = path[len(top) :].rstrip("/")
                yield Group(f"{mount.point}{below}", mount.point, mount.version)

    def memory_limits(self, group: Group) -> Iterator[tuple[int, str]]:
        """Those of this cgroup and of those above it, in bytes, each with its folder."""
        for path in group.upward():
            limit = self._files.read(f"{path}/{group.limit_name}", _limit)
            if limit and limit < _NO_LIMIT:
                yield limit, path

    def _mounts_of(self, text: str) -> list[_Mount]:
        found = []
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            fields, kind = left.split(" "), right.split(" ")
            if kind[0] in ("cgroup", "cgroup2"):
                version = 2 if kind[0] == "cgroup2" else 1
                point = str(self._root / fields[4].lstrip("/"))
                found.append(_Mount(version, frozenset(kind[2].split(",")), fields[3], point))
        return found


def _by_controller(text: str) -> dict[str, str]:
    """The cgroup of a process by each controller; that of version 2 by none."""
    inner = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        inner.update(dict.fromkeys(controllers.split(","), path))
    return inner


# In version 1 a cgroup without a limit has a number near 2^63.
_NO_LIMIT = 1 << 60


class Share(NamedTuple):
    """The cgroup whose memory or processor time counts as the node's."""

    path: str
    version: int
    limit: float | None
    """In bytes, or in cores; None if there is none."""


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

    def memory(self, node_bytes: int | None) -> Share | None:
        """None if the training may use all memory of the node."""
        for group in self._groups("memory"):
            most = node_bytes or _NO_LIMIT
            found = [each for each in self._cgroups.memory_limits(group) if each[0] < most]
            if found:
                limit_bytes, path = min(reversed(found), key=itemgetter(0))
                return Share(path, group.version, limit_bytes)
            if group.in_container() and os.path.exists(f"{group.top}/{group.limit_name}"):
                return Share(group.top, group.version, None)
        return None

    def processors(self, online: int) -> Share | None:
        """None if the training may use all processors of the node.

        Version 1 has other files, which are not read.
        """
        files = (("cpu.max", _quota), ("cpuset.cpus.effective", _count))
        found = [
            (cores, path)
            for group in self._groups("cpu")
            for path in group.upward()
            for cores in (self._files.read(f"{path}/{name}", parse) for name, parse in files)
            if cores and cores < online
        ]
        if found:
            cores, path = min(reversed(found), key=itemgetter(0))
            return Share(path, 2, cores)
        container = self.container()
        return Share(container, 2, online) if container and online else None

    def container(self) -> str:
        """The folder of the container's cgroup of version 2; empty if there is none."""
        for group in self._groups(""):
            if group.version == 2 and group.in_container():
                return group.top
        return ""


def _limit(text: str) -> int | None:
    return None if text.strip() == "max" else int(text)


def _quota(text: str) -> float | None:
    """In cores."""
    quota, period = text.split()
    return None if quota == "max" else int(quota) / int(period)


def _count(text: str) -> float:
    """How many processors are in a list such as `0,2-3`."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
