"""Knows the parent of each process of the node, at the cost of one listing of /proc."""

from __future__ import annotations

from collections.abc import Collection

from otel_ddp.agent.node.kernel_files import KernelFiles
from otel_ddp.agent.node.process.process_stat import read_process_stat


class ProcessTree:
    """Reads new processes only: the parent of a process does not change while that one lives.

    /proc/<pid>/task/*/children would have to be read for every thread of every rank, which takes
    thirty times as long for eight ranks of a hundred threads.
    """

    def __init__(self, files: KernelFiles, proc: str) -> None:
        self._files = files
        self._proc = proc
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def poll(self) -> None:
        """Read the processes that are new, and forget those that ended."""
        pids = {int(name) for name in self._files.names(self._proc) if name.isdecimal()}
        parents: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        # A process id that was reused between two polls would be taken for the same process. The
        # kernel gives out thousands, mostly millions, of ids before it reuses one.
        for pid in pids:
            parent = self._parents.get(pid)
            # 0 is the parent of a process that entered this namespace from outside.
            if parent is None or (parent and parent not in pids):
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
        """The descendants of a process, without these processes and their descendants."""
        found: list[int] = []
        above = [pid]
        # Parents that were read at different times may form a ring.
        apart = {pid, *without}
        while above:
            for child in self._children.get(above.pop(), ()):
                if child not in apart:
                    found.append(child)
                    above.append(child)
        return found
