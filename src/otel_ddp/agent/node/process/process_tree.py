"""Reads the fields of a process, and knows its descendants at the cost of one listing of /proc."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from otel_ddp.agent.node.kernel_files import KernelFiles, number


class ProcessStat(NamedTuple):
    """Times in ticks; `children_*` are of the children that it has waited for."""

    alive: bool
    """False for a zombie: only its exit status is left, for its parent to read."""
    parent: int
    user: int
    system: int
    children_user: int
    children_system: int
    threads: int
    start: int
    virtual_bytes: int
    resident_pages: int


# Where /proc/<pid>/stat has the fields above, behind the name.
_PLACES = (1, 11, 12, 13, 14, 17, 19, 20, 21)


def read_process_stat(files: KernelFiles, proc: str, pid: int) -> ProcessStat | None:
    """The fields of a process; None if there is no such process."""
    text = files.text(f"{proc}/{pid}/stat", "stat")
    if not text:
        return None
    # The name in parentheses may contain anything, even parentheses.
    words = text.rpartition(")")[2].split()
    fields = [number(words[place]) for place in _PLACES if place < len(words)]
    known = [field for field in fields if field is not None]
    if len(known) < len(_PLACES):
        files.leave_out("stat", "the line of a process lacks numbers")
        return None
    return ProcessStat(words[0] not in ("Z", "X", "x"), *known)


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
        children: dict[int, list[int]] = defaultdict(list)
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
            children[parent].append(pid)
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
            below = [each for each in self._children.get(above.pop(), ()) if each not in apart]
            found += below
            above += below
        return found
