"""Reads what a training process and its descendants use, and how long ranks wait for a core."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
# Ticks, then bytes.
AMOUNTS = ("user", "system", "read", "write")
Amounts = Mapping[str, int]


class Relative(NamedTuple):
    """A descendant and what it used, including its own children that it waited for."""

    stat: ProcessStat
    io: Amounts | None
    """None if the file may not be read."""

    def amounts(self) -> Amounts:
        stat, io = self.stat, self.io or {}
        return {
            "user": stat.user + stat.children_user,
            "system": stat.system + stat.children_system,
            "read": io.get("read", 0),
            "write": io.get("write", 0),
        }


class Family:
    """What one training process and its descendants used, since the agent first saw them.

    The kernel adds the time and the I/O of a process that ended to the parent that waited for it.
    It keeps such time apart, but not I/O: what a worker has read would count again as I/O of the
    training process at the end of each epoch.

    No file of the kernel says which ended process left what. An agent that starts again cannot
    know it: so everything counts from the first read on, and a new agent begins at 0.
    """

    def __init__(self, start_ns: int) -> None:
        """*start_ns*: the time of the first read, in nanoseconds since 1970."""
        self.start_ns = start_ns
        self._relatives: dict[tuple[int, int], Relative] = {}
        # The I/O of those that ended, which the kernel has added to that of the process.
        self._inherited = {"read": 0, "write": 0}
        self._io_is_known = True
        self._first: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def update(self, pid: int, relatives: Mapping[tuple[int, int], Relative]) -> None:
        """Account for the descendants that are no longer in *relatives*: they have ended."""
        left = {key[0]: each for key, each in self._relatives.items() if key not in relatives}
        for relative in left.values():
            heir = relative.stat.parent
            for _ in left:
                heir = left[heir].stat.parent if heir in left else heir
            # Otherwise the heir is in the family, and its own numbers include them.
            if heir == pid:
                amounts = relative.amounts()
                for direction in self._inherited:
                    self._inherited[direction] += amounts[direction]
        self._relatives = {key: self._with_io(key, each) for key, each in relatives.items()}
        if relatives:
            self._io_is_known = any(each.io is not None for each in self._relatives.values())

    def own_io(self, io: Amounts) -> Amounts:
        """The I/O of the process alone. *io*: its file, read before those of its descendants."""
        return {
            direction: self._since_first(f"own {direction}", amount - self._inherited[direction])
            for direction, amount in io.items()
        }

    def total(self, stat: ProcessStat) -> Amounts:
        """What all descendants used. *stat*: of the process itself."""
        of_ended = {"user": stat.children_user, "system": stat.children_system}
        total = {**of_ended, **self._inherited}
        for relative in self._relatives.values():
            for name, amount in relative.amounts().items():
                total[name] += amount
        known = AMOUNTS if self._io_is_known else ("user", "system")
        return {name: self._since_first(name, total[name]) for name in known}

    def _since_first(self, name: str, amount: int) -> int:
        """The growth since the first read; it never falls."""
        grown = amount - self._first.setdefault(name, amount)
        # A process that ends while we read may be missing on both sides until the next read.
        self._reported[name] = max(grown, self._reported.get(name, 0))
        return self._reported[name]

    def _with_io(self, key: tuple[int, int], relative: Relative) -> Relative:
        """With the last known I/O, if the process ended between the reads of its two files."""
        before = self._relatives.get(key)
        return relative._replace(io=before.io) if before and relative.io is None else relative


# The kernel's word -> ours.
_SWITCHES = {
    "voluntary_ctxt_switches": "voluntary",
    "nonvoluntary_ctxt_switches": "involuntary",
}


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ProcessReader:
    """One for all training processes of the node: they share one listing of /proc."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        own_pid: int | None = None,
        since_boot_s: Callable[[], float] = _since_boot_s,
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._files = KernelFiles()
        self._proc = str(proc)
        # If the training is process 1 of a container, the agent is its child.
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._since_boot_s = since_boot_s
        self._tree = ProcessTree(self._files, self._proc)
        self._families: dict[tuple[int, int], Family] = {}
        self._boot_ns = boot_ns()

    @property
    def errors(self) -> int:
        """How many numbers were left out so far."""
        return self._files.errors

    @contained()
    def begin_round(self) -> None:
        """List the processes of the node; call it before each round of `read`."""
        self._tree.poll()
        self._families = {
            key: family for key, family in self._families.items() if key[0] in self._tree
        }

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
        key = pid, start_ticks
        if key not in self._families:
            self._families[key] = Family(self._boot_ns + int(self._since_boot_s() * 1e9))
        family, since_ns = self._families[key], self._families[key].start_ns
        # Read before the descendants: the process may wait for one at any moment, and then includes
        # its I/O. What it includes by now is subtracted again.
        io = self._io(pid) or {}
        relatives = self._relatives(pid, {*others, self._own_pid})
        family.update(pid, relatives)
        total = family.total(stat)
        alive = [each.stat for each in relatives.values() if each.stat.alive]
        pages = sum(each.resident_pages for each in alive)
        return [
            *self._of_kernel(pid, stat),
            *_bytes(catalog.PROCESS_DISK_IO, family.own_io(io), since_ns),
            Measurement(catalog.TRAINING_CHILDREN_COUNT, len(alive)),
            Measurement(catalog.TRAINING_CHILDREN_MEMORY_USAGE, pages * _PAGE_BYTES),
            *_times(catalog.TRAINING_CHILDREN_CPU_TIME, total["user"], total["system"], since_ns),
            *_bytes(catalog.TRAINING_CHILDREN_DISK_IO, total, since_ns),
        ]

    def _of_kernel(self, pid: int, stat: ProcessStat) -> Iterator[Measurement]:
        """What the kernel says of the process itself."""
        start_ns = self._boot_ns + stat.start * _NS_PER_TICK
        yield from _times(catalog.PROCESS_CPU_TIME, stat.user, stat.system, start_ns)
        yield Measurement(catalog.PROCESS_MEMORY_USAGE, stat.resident_pages * _PAGE_BYTES)
        yield Measurement(catalog.PROCESS_MEMORY_VIRTUAL, stat.virtual_bytes)
        yield Measurement(catalog.PROCESS_THREAD_COUNT, stat.threads)
        uptime_s = self._since_boot_s() - stat.start / _TICKS_PER_S
        yield Measurement(catalog.PROCESS_UPTIME, uptime_s)
        # Of the main thread: all threads would cost more than everything else together.
        found = self._files.numbers(f"{self._proc}/{pid}/status", _SWITCHES, "status")
        for name, count in found.items():
            attributes = (("process.context_switch.type", _SWITCHES[name]),)
            yield Measurement(catalog.PROCESS_CONTEXT_SWITCHES, count, attributes, start_ns)
        try:
            count = len(os.listdir(f"{self._proc}/{pid}/fd"))
        except OSError as error:
            self._files.failed("fd", error)
        else:
            yield Measurement(catalog.PROCESS_UNIX_FILE_DESCRIPTOR_COUNT, count)

    def _io(self, pid: int) -> Amounts | None:
        found = self._files.numbers(f"{self._proc}/{pid}/io", ("read_bytes", "write_bytes"), "io")
        return {name.removesuffix("_bytes"): value for name, value in found.items()} or None

    def _relatives(self, pid: int, without: Collection[int]) -> dict[tuple[int, int], Relative]:
        found = {}
        for child in self._tree.descendants(pid, without):
            stat = read_process_stat(self._files, self._proc, child)
            if stat is not None:
                found[child, stat.start] = Relative(stat, self._io(child))
        return found


def _times(metric: Metric, user: int, system: int, start_ns: int) -> Iterator[Measurement]:
    for mode, ticks in (("user", user), ("system", system)):
        yield Measurement(metric, ticks / _TICKS_PER_S, (("cpu.mode", mode),), start_ns)


def _bytes(metric: Metric, amounts: Amounts, start_ns: int) -> Iterator[Measurement]:
    for direction in ("read", "write"):
        if direction in amounts:
            attributes = (("disk.io.direction", direction),)
            yield Measurement(metric, amounts[direction], attributes, start_ns)
