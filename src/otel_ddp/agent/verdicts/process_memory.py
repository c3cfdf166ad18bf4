"""Reads how much memory a process holds, its limit, and out-of-memory kills of its cgroup."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from otel_ddp import files
from otel_ddp.agent.node.host.limits import Cgroups, Group
from otel_ddp.agent.node.source import KernelFiles

# A cgroup of version 1 without a limit says so with a number near 2^63.
_NO_LIMIT = 1 << 60
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessMemory:
    """Memory of any process under this root."""

    def __init__(self, root: Path) -> None:
        self._proc = root / "proc"
        self._cgroups = Cgroups(KernelFiles(), proc=self._proc, root=root)

    def held(self, pid: int) -> tuple[int, int] | None:
        """Bytes in memory, and those of them that no other process shares."""
        fields = (files.read_text(self._proc / str(pid) / "statm") or "").split()[:3]
        # A dying process has given its memory back already.
        if len(fields) < 3 or not all(map(str.isdigit, fields)) or fields[1] == "0":
            return None
        resident, shared = int(fields[1]), int(fields[2])
        return resident * _PAGE, max(resident - shared, 0) * _PAGE

    def group(self, pid: int) -> Group | None:
        """The memory cgroup of the process, if it counts kills."""
        for group in self._cgroups.groups(pid, "memory"):
            if self.count_kills(group) is not None:
                return group
        return None

    def count_kills(self, group: Group) -> int | None:
        """How many out-of-memory kills the cgroup has counted."""
        name = "memory.oom_control" if group.version == 1 else "memory.events"
        return _numbers_by_word(files.read_text(Path(group.path, name))).get("oom_kill")

    def limit(self, group: Group | None) -> tuple[int | None, str]:
        """The smallest limit above this process, and what sets it."""
        found: list[tuple[int, str]] = []
        memory = (files.read_text(self._proc / "meminfo") or "").replace(":", "")
        total = _numbers_by_word(memory).get("MemTotal")
        if total is not None:
            found.append((total * 1024, "node"))
        if group is not None:
            name = "memory.limit_in_bytes" if group.version == 1 else "memory.max"
            for path in group.upward():
                limit = (files.read_text(Path(path, name)) or "").strip()
                if limit.isdigit() and int(limit) < _NO_LIMIT:
                    found.append((int(limit), "memory cgroup"))
        return min(found) if found else (None, "")


def _numbers_by_word(text: str | None) -> Mapping[str, int]:
    """The lines that are a word and a number."""
    rows = (line.split() for line in (text or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
