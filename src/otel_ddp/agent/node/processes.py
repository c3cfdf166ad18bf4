"""Reads what a training process and its descendants use, and how long ranks wait for a core."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.source import KernelFiles, Measurement, boot_ns, number
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.errors import contained
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
    threads: int
    start: int
    resident_pages: int


# Where /proc/<pid>/stat has the fields above, behind the name.
_PLACES = (1, 11, 12, 13, 14, 17, 19, 21)


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
            # A kernel without it, another PID namespace, or a process that has just ended.
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (self._proc / str(rank.pid) / "schedstat").read_text()
                # How long the main thread, which trains, was ready to run and had no core.
                waited_ns = int(text.split()[1])
                key = rank.labels, rank.pid, rank.start_ticks
                points = self._waits_ns[key] = before.get(key, deque(maxlen=_KEPT))
                points.append((now_ns, waited_ns))

    def waits(self) -> dict[Labels, float]:
        """By rank: seconds for which it waited for a core, in each second of late."""
        found = {}
        for (labels, _, _), points in self._waits_ns.items():
            (first_ns, first), (last_ns, last) = points[0], points[-1]
            if last_ns > first_ns:
                found[labels] = (last - first) / (last_ns - first_ns)
        return found


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_TICK = 1_000_000_000 // _TICKS_PER_S


class ProcessReader:
    """One for all training processes of the node: they share one listing of /proc."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        own_pid: int | None = None,
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._files = KernelFiles()
        self._proc = str(proc)
        # If the training is process 1 of a container, the agent is its child.
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._tree = ProcessTree(self._files, self._proc)
        # By process id and start: the highest count of each series.
        self._highest: dict[tuple[int, int], dict[str, int]] = {}
        self._boot_ns = boot_ns()

    @property
    def errors(self) -> int:
        """How many numbers were left out so far."""
        return self._files.errors

    @contained()
    def begin_round(self) -> None:
        """List the processes of the node; call it before each round of `read`."""
        self._tree.poll()
        self._highest = {key: each for key, each in self._highest.items() if key[0] in self._tree}

    @contained()
    def read(
        self, pid: int, start_ticks: int, others: Collection[int] = ()
    ) -> list[Measurement] | None:
        """All measurements of this process; None if it has ended or the id was reused.

        *others*: the other training processes of the node.
        """
        stat = read_process_stat(self._files, self._proc, pid)
        if stat is None or stat.start != start_ticks or not stat.alive:
            return None
        counts, alive = self._with_descendants(stat, pid, {*others, self._own_pid})
        highest = self._highest.setdefault((pid, start_ticks), {})
        for name, count in counts.items():
            highest[name] = max(count, highest.get(name, 0))
        start_ns = self._boot_ns + stat.start * _NS_PER_TICK
        pages = sum(each.resident_pages for each in alive)
        children_ticks = highest["user"], highest["system"]
        return [
            *self._of_kernel(pid, stat, start_ns),
            Measurement(catalog.TRAINING_CHILDREN_COUNT, len(alive)),
            Measurement(catalog.TRAINING_CHILDREN_MEMORY_USAGE, pages * _PAGE_BYTES),
            *_times(catalog.TRAINING_CHILDREN_CPU_TIME, *children_ticks, start_ns),
            *(
                Measurement(
                    *(catalog.PROCESS_DISK_IO, highest[direction]),
                    (("disk.io.direction", direction),),
                    start_ns,
                )
                for direction in ("read", "write")
                if direction in counts
            ),
        ]

    def _with_descendants(
        self, stat: ProcessStat, pid: int, without: Collection[int]
    ) -> tuple[dict[str, int], list[ProcessStat]]:
        """Ticks of its descendants, bytes of all of them, and the descendants that live.

        The kernel adds what a child has used to the process that waited for it. So the process is
        read before its descendants: one that ends meanwhile is missed once, not counted twice.
        """
        ticks = {"user": stat.children_user, "system": stat.children_system}
        moved, alive = self._io(pid), []
        for child in self._tree.descendants(pid, without):
            found = read_process_stat(self._files, self._proc, child)
            if found is None:
                continue
            ticks["user"] += found.user + found.children_user
            ticks["system"] += found.system + found.children_system
            its_own = self._io(child)
            moved = {way: amount + its_own.get(way, 0) for way, amount in moved.items()}
            if found.alive:
                alive.append(found)
        return ticks | moved, alive

    def _of_kernel(self, pid: int, stat: ProcessStat, start_ns: int) -> Iterator[Measurement]:
        """What the kernel says of the process itself."""
        yield from _times(catalog.PROCESS_CPU_TIME, stat.user, stat.system, start_ns)
        yield Measurement(catalog.PROCESS_MEMORY_USAGE, stat.resident_pages * _PAGE_BYTES)
        yield Measurement(catalog.PROCESS_THREAD_COUNT, stat.threads)
        try:
            count = len(os.listdir(f"{self._proc}/{pid}/fd"))
        except OSError as error:
            self._files.failed("fd", error)
        else:
            yield Measurement(catalog.PROCESS_UNIX_FILE_DESCRIPTOR_COUNT, count)

    def _io(self, pid: int) -> dict[str, int]:
        """Bytes by direction; those that may not be read are left out."""
        found = self._files.numbers(f"{self._proc}/{pid}/io", ("read_bytes", "write_bytes"), "io")
        return {name.removesuffix("_bytes"): value for name, value in found.items()}


def _times(metric: Metric, user: int, system: int, start_ns: int) -> Iterator[Measurement]:
    for mode, ticks in (("user", user), ("system", system)):
        yield Measurement(metric, ticks / _TICKS_PER_S, (("cpu.mode", mode),), start_ns)
