"""Reads CPU time and memory of ranks and their descendants, and the ranks' waits for a core."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.source import KernelFiles, Measurement, boot_ns
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Metric


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat. Times are in ticks; `children_*`: times of reaped children."""

    alive: bool
    """Whether the process lives; false for a zombie."""
    parent: int
    user: int
    system: int
    children_user: int
    children_system: int
    start: int
    resident_pages: int


# Positions of the fields of ProcessStat, counted from the first field after the process's name.
_PLACES = (1, 11, 12, 13, 14, 19, 21)


def read_process_stat(files: KernelFiles, proc: str, pid: int) -> ProcessStat | None:
    """Read /proc/<pid>/stat; None if there is no such process."""
    return files.read(f"{proc}/{pid}/stat", _stat, "stat")


def _stat(text: str) -> ProcessStat:
    # The process's name, which is in parentheses, may contain parentheses itself.
    words = text.rpartition(")")[2].split()
    fields = [int(words[place]) for place in _PLACES]
    return ProcessStat(words[0] not in ("Z", "X", "x"), *fields)


class ProcessTree:
    """The tree of all processes.

    Each poll reads only new processes, since a process keeps its parent while the parent lives.

    It does not use /proc/<pid>/task/*/children, one file per thread: for eight ranks with a hundred
    threads each, this takes thirty times as long.
    """

    def __init__(self, files: KernelFiles, proc: str) -> None:
        self._files = files
        self._proc = proc
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def poll(self) -> None:
        """Read new processes, and forget ended ones."""
        names = self._files.names(self._proc) or ()
        pids = {int(name) for name in names if name.isdecimal()}
        parents: dict[int, int] = {}
        children: dict[int, list[int]] = defaultdict(list)
        # If a pid is reused between two polls, the new process is mistaken for the old one. This is
        # unlikely: the kernel uses all other pids first.
        for pid in pids:
            parent = self._parents.get(pid)
            # Don't read again if the parent is 0: the process was started from outside of this PID
            # namespace, and its parent stays 0.
            if parent is None or (parent and parent not in pids):
                stat = read_process_stat(self._files, self._proc, pid)
                if stat is None:
                    continue
                parent = stat.parent
            parents[pid] = parent
            children[parent].append(pid)
        self._parents, self._children = parents, children

    def descendants(self, pid: int, without: Collection[int]) -> list[int]:
        """The descendants of a process, except the processes *without* and their descendants."""
        found: list[int] = []
        above = [pid]
        # Exclude the process itself too. The parents were read at different times, so they may form
        # a cycle, in which the loop would never end.
        apart = {pid, *without}
        while above:
            below = [each for each in self._children.get(above.pop(), ()) if each not in apart]
            found += below
            above += below
        return found


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_TICK = 1_000_000_000 // _TICKS_PER_S
# Over how many readings the wait for a core is averaged.
_KEPT = 16


class _Seen:
    """State of a process between readings."""

    def __init__(self) -> None:
        self.children_ticks = (0, 0)
        """The highest user and system times of all descendants so far, in ticks."""
        self.waits_ns: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        """Pairs of a time and the main thread's cumulative wait for a core at that time."""

    def core_wait(self) -> float | None:
        """The share of time in which the main thread was runnable without a core."""
        (first_ns, first), (last_ns, last) = self.waits_ns[0], self.waits_ns[-1]
        return (last - first) / (last_ns - first_ns) if last_ns > first_ns else None


class ProcessUse(NamedTuple):
    """What one training process and its descendants use."""

    measurements: list[Measurement]
    core_wait: float | None
    """The share of the last half minute spent waiting for a core; None if unknown."""


class ProcessSample(NamedTuple):
    """All training processes at one time, by their labels."""

    uses: dict[Labels, ProcessUse]
    missed: list[str]
    """The ranks whose processes could not be read."""


class ProcessReader:
    """Reads all training processes of the node with one listing of /proc."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        own_pid: int | None = None,
        boot_ns: Callable[[], int] = boot_ns,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._files = KernelFiles()
        self._proc = str(proc)
        # The agent does not count as a worker of the training, although it may be its child: in a
        # container in which the training is process 1, all orphaned processes are.
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._tree = ProcessTree(self._files, self._proc)
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._boot_ns = boot_ns()
        self._clock_ns = clock_ns
        self.ranks: Sequence[Rank] = ()
        """The ranks to read."""
        self.pids: Collection[int] = ()
        """All training processes. If one is a descendant of another, it isn't its worker."""

    def read(self) -> ProcessSample:
        """Read the process of each rank."""
        ranks, uses, missed = self.ranks, {}, []
        if ranks:
            self._tree.poll()
        # Of two processes with equal labels, read the one that started last.
        newest = {each.labels: each for each in sorted(ranks, key=lambda each: each.start_ticks)}
        for labels, rank in newest.items():
            use = self._read(rank.pid, rank.start_ticks) if rank.pid else None
            if use is not None:
                uses[labels] = use
            else:
                missed.append(dict(labels).get("rank", ""))
        there = {(each.pid, each.start_ticks) for each in ranks}
        self._seen = {key: each for key, each in self._seen.items() if key in there}
        return ProcessSample(uses, missed)

    def _read(self, pid: int, start_ticks: int) -> ProcessUse | None:
        """Read one process; None if it has ended, or its pid was reused."""
        stat = read_process_stat(self._files, self._proc, pid)
        if stat is None or stat.start != start_ticks or not stat.alive:
            return None
        seen = self._seen.setdefault((pid, start_ticks), _Seen())
        user, system, alive = self._descendants(stat, pid)
        seen.children_ticks = max(user, seen.children_ticks[0]), max(system, seen.children_ticks[1])
        start_ns = self._boot_ns + stat.start * _NS_PER_TICK
        pages = sum(each.resident_pages for each in alive)
        measurements = [
            *_times(catalog.PROCESS_CPU_TIME, stat.user, stat.system, start_ns),
            Measurement(catalog.PROCESS_MEMORY_USAGE, stat.resident_pages * _PAGE_BYTES),
            Measurement(catalog.TRAINING_CHILDREN_COUNT, len(alive)),
            Measurement(catalog.TRAINING_CHILDREN_MEMORY_USAGE, pages * _PAGE_BYTES),
            *_times(catalog.TRAINING_CHILDREN_CPU_TIME, *seen.children_ticks, start_ns),
        ]
        path = f"{self._proc}/{pid}/schedstat"
        waited_ns = self._files.read(path, lambda text: int(text.split()[1]), "schedstat")
        if waited_ns is None:
            return ProcessUse(measurements, None)
        seen.waits_ns.append((self._clock_ns(), waited_ns))
        return ProcessUse(measurements, seen.core_wait())

    def _descendants(self, stat: ProcessStat, pid: int) -> tuple[int, int, list[ProcessStat]]:
        """User and system ticks of all descendants, and the living descendants.

        The kernel adds the time of a reaped child to its parent. So read the parent first: the time
        of a descendant that ends in between is missing in this reading, but is not counted twice.
        """
        user, system, alive = stat.children_user, stat.children_system, []
        for child in self._tree.descendants(pid, {*self.pids, self._own_pid} - {pid}):
            found = read_process_stat(self._files, self._proc, child)
            if found is None:
                continue
            user += found.user + found.children_user
            system += found.system + found.children_system
            if found.alive:
                alive.append(found)
        return user, system, alive


def _times(metric: Metric, user: int, system: int, start_ns: int) -> Iterator[Measurement]:
    for mode, ticks in (("user", user), ("system", system)):
        yield Measurement(metric, ticks / _TICKS_PER_S, (("cpu.mode", mode),), start_ns)
