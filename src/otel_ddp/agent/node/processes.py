"""Reads what a training process and its descendants use, and how long ranks wait for a core."""

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
    """Times in ticks; `children_*` are of the children that it has waited for."""

    alive: bool
    """False for a zombie: only its exit status is left, for its parent to read."""
    parent: int
    user: int
    system: int
    children_user: int
    children_system: int
    start: int
    resident_pages: int


# Where /proc/<pid>/stat has the fields above, behind the name.
_PLACES = (1, 11, 12, 13, 14, 19, 21)


def read_process_stat(files: KernelFiles, proc: str, pid: int) -> ProcessStat | None:
    """The fields of a process; None if there is no such process."""
    return files.read(f"{proc}/{pid}/stat", _stat, "stat")


def _stat(text: str) -> ProcessStat:
    # The name in parentheses may contain anything, even parentheses.
    words = text.rpartition(")")[2].split()
    fields = [int(words[place]) for place in _PLACES]
    return ProcessStat(words[0] not in ("Z", "X", "x"), *fields)


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
        names = self._files.names(self._proc) or ()
        pids = {int(name) for name in names if name.isdecimal()}
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


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_TICK = 1_000_000_000 // _TICKS_PER_S
# The share of time without a core is over so many of the last readings.
_KEPT = 16


class _Seen:
    """What is remembered of a process between two readings."""

    def __init__(self) -> None:
        self.children_ticks = (0, 0)
        """The highest that its descendants had spent: as users, and in the system."""
        self.waits_ns: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        """When it was read, and how long the main thread had waited for a core by then."""

    def core_wait(self) -> float | None:
        """For which share of the time the main thread was ready to run and had no core."""
        (first_ns, first), (last_ns, last) = self.waits_ns[0], self.waits_ns[-1]
        return (last - first) / (last_ns - first_ns) if last_ns > first_ns else None


class ProcessUse(NamedTuple):
    """What one training process uses, with its descendants."""

    measurements: list[Measurement]
    core_wait: float | None
    """The share of the last half minute in which it had no core; None if unknown."""


class ProcessSample(NamedTuple):
    """The processes at one moment, by the labels of their ranks."""

    uses: dict[Labels, ProcessUse]
    missed: list[str]
    """Ranks whose process could not be read."""


class ProcessReader:
    """One for all training processes of the node: they share one listing of /proc."""

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
        # If the training is process 1 of a container, the agent is its child.
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._tree = ProcessTree(self._files, self._proc)
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._boot_ns = boot_ns()
        self._clock_ns = clock_ns
        self.ranks: Sequence[Rank] = ()
        """Whom to read."""
        self.pids: Collection[int] = ()
        """All training processes; none of them counts as a worker of another one."""

    def read(self) -> ProcessSample:
        """All measurements of each rank's process."""
        ranks, uses, missed = self.ranks, {}, []
        if ranks:
            self._tree.poll()
        self._seen = {key: each for key, each in self._seen.items() if key[0] in self._tree}
        # Of two processes with the same labels the one that was started last.
        newest = {each.labels: each for each in sorted(ranks, key=lambda each: each.start_ticks)}
        for labels, rank in newest.items():
            use = self._read(rank.pid, rank.start_ticks) if rank.pid else None
            if use is not None:
                uses[labels] = use
            else:
                missed.append(dict(labels).get("rank", ""))
        return ProcessSample(uses, missed)

    def _read(self, pid: int, start_ticks: int) -> ProcessUse | None:
        """None if the process has ended or the id was reused."""
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
        """The ticks of its descendants, as users and in the system, and those that live.

        The kernel adds what a child has used to the process that waited for it. So the process is
        read before its descendants: one that ends meanwhile is missed once, not counted twice.
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
