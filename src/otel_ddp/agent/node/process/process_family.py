"""Separates a process's own time and I/O from its descendants', also of those that ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from otel_ddp.agent.node.process.process_tree import ProcessStat

# Ticks, then bytes.
AMOUNTS = ("user", "system", "read", "write")
Amounts = Mapping[str, int]

NOTHING: Amounts = dict.fromkeys(AMOUNTS, 0)


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
        # Used by descendants that ended or left, and included by no process of the family.
        self._kept = dict(NOTHING)
        # The descendants' I/O that the kernel has added to that of the process.
        self._inherited = {"read": 0, "write": 0}
        self._io_is_known = True
        self._first: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def update(
        self,
        pid: int,
        relatives: Mapping[tuple[int, int], Relative],
        lives_on: Callable[[tuple[int, int]], bool],
        waits: bool,
    ) -> None:
        """Account for the descendants that are no longer in *relatives*.

        *lives_on*: whether one lives on outside the family. *waits*: false if the process ignores
        the end of its children; then the kernel adds them to no process.
        """
        left = {key[0]: each for key, each in self._relatives.items() if key not in relatives}
        for number, relative in left.items():
            amounts = relative.amounts()
            if lives_on((number, relative.stat.start)):
                self._keep(amounts, AMOUNTS)
                continue
            heir = relative.stat.parent
            for _ in left:
                heir = left[heir].stat.parent if heir in left else heir
            # Otherwise the heir is in the family, and its own numbers include them.
            if heir == pid:
                self._keep(amounts, ("read", "write") if waits else AMOUNTS)
                if waits:
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
        total = {**self._kept}
        total["user"] += stat.children_user
        total["system"] += stat.children_system
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

    def _keep(self, amounts: Amounts, names: tuple[str, ...]) -> None:
        for name in names:
            self._kept[name] += amounts[name]
