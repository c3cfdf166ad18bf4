"""Reads the fields of a process, knows its descendants, and how long ranks wait for a core."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.source import KernelFiles, number
from otel_ddp.agent.reading.journals import Rank


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


_EVERY_NS = 2_000_000_000
# The rate is over so many of the last readings.
_KEPT = 16


class CoreUse:
    """One per node. Only the agent's loop calls it: one small file for each rank."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._read_ns = 0
        # When, and how long the main thread has waited so far, by process.
        self._waits_ns: dict[tuple[Labels, int, int], deque[tuple[int, int]]] = {}

    def poll(self, ranks: Iterable[Rank], now_ns: int) -> None:
        """Read those of these ranks; the others have ended."""
        if now_ns - self._read_ns < _EVERY_NS:
            return
        self._read_ns = now_ns
        before, self._waits_ns = self._waits_ns, {}
        for rank in ranks:
            waited_ns = self._waited_ns(rank.pid)
            if waited_ns is not None:
                key = rank.labels, rank.pid, rank.start_ticks
                points = self._waits_ns[key] = before.get(key, deque(maxlen=_KEPT))
                points.append((now_ns, waited_ns))

    def _waited_ns(self, pid: int) -> int | None:
        """For how long the main thread, which trains, was ready to run and had no core."""
        try:
            return int((self._proc / str(pid) / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            # A kernel without it, another PID namespace, or a process that has just ended.
            return None

    def waits(self) -> dict[Labels, float]:
        """By rank: seconds for which it waited for a core, in each second of late."""
        found = {}
        for (labels, _, _), points in self._waits_ns.items():
            (first_ns, first), (last_ns, last) = points[0], points[-1]
            if last_ns > first_ns:
                found[labels] = (last - first) / (last_ns - first_ns)
        return found
