"""Knows which process of the node was started by which, at the price of one look at /proc."""

from __future__ import annotations

from collections.abc import Collection

from otel_ddp.agent.node.kernel_files import KernelFiles
from otel_ddp.agent.node.process.process_stat import read_process_stat


class ProcessTree:
    """Only who is new is read: a parent never changes while it lives.

    /proc/<pid>/task/*/children would have to be read of every thread of every rank, which takes
    thirty times as long for eight ranks of a hundred threads.
    """

    def __init__(self, files: KernelFiles, proc: str) -> None:
        self._files = files
        self._proc = proc
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def look(self) -> None:
        """See who is there now."""
        there = {int(name) for name in self._files.names(self._proc) if name.isdecimal()}
        parents: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        # A number that came round to another process between two looks would be taken for the
        # first one: the kernel deals thousands, mostly millions, before it comes round.
        for pid in there:
            parent = self._parents.get(pid)
            # 0 is the parent of what was put here from outside.
            if parent is None or (parent and parent not in there):
                stat = read_process_stat(self._files, self._proc, pid)
                if stat is None:
                    continue
                parent = stat.parent
            parents[pid] = parent
            children.setdefault(parent, []).append(pid)
        self._parents, self._children = parents, children

    def __contains__(self, pid: int) -> bool:
        return pid in self._parents

    def descendants(self, pid: int, without: Collection[int]) -> list[int]:
        """Everyone below a process but these, and who is below them."""
        found: list[int] = []
        above = [pid]
        # Lines that were read at different times may make a ring, which comes back to the first.
        apart = {pid, *without}
        while above:
            for child in self._children.get(above.pop(), ()):
                if child not in apart:
                    found.append(child)
                    above.append(child)
        return found
