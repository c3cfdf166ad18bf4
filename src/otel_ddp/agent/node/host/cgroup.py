"""Finds the cgroup of a process, versions 1 and 2, in the tree that is visible here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.node.kernel_files import KernelFiles


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

    def in_container(self) -> bool:
        """Whether the highest visible cgroup is a container's, and not the machine's."""
        # In version 1 only the machine's root has this file; in version 2 all others have that one.
        if self.version == 1:
            return os.path.isdir(self.top) and not os.path.exists(f"{self.top}/release_agent")
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
        # A hybrid machine has both, version 2 without controllers: so version 1 comes first.
        self._mounts = sorted(self._read_mounts(), key=lambda mount: mount.version)

    def groups(self, pid: int | str, controller: str) -> Iterator[Group]:
        """The cgroups that may control a process (or `self`); their files may be missing."""
        inner: dict[str, str] = {}
        for line in (self._files.text(f"{self._proc}/{pid}/cgroup", "cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            for each in controllers.split(","):
                inner[each] = path
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

    def _read_mounts(self) -> Iterator[_Mount]:
        for line in (self._files.text(f"{self._proc}/self/mountinfo") or "").splitlines():
            left, _, right = line.partition(" - ")
            fields, kind = left.split(" "), right.split(" ")
            if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
                continue
            version = 2 if kind[0] == "cgroup2" else 1
            point = str(self._root / fields[4].replace("\\040", " ").lstrip("/"))
            yield _Mount(version, frozenset(kind[2].split(",")), fields[3], point)
