"""Tells what a process takes from what its descendants take, those that have ended included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from otel_ddp.agent.node.process.process_stat import ProcessStat

# Ticks, then bytes.
AMOUNTS = ("user", "system", "read", "write")
Amounts = Mapping[str, int]

NOTHING: Amounts = dict.fromkeys(AMOUNTS, 0)


class Relative(NamedTuple):
    """A descendant, with what it took; what it waited for is in there."""

    stat: ProcessStat
    io: Amounts | None
    """None where it may not be read."""

    def amounts(self) -> Amounts:
        stat, io = self.stat, self.io or {}
        return {
            "user": stat.user + stat.children_user,
            "system": stat.system + stat.children_system,
            "read": io.get("read", 0),
            "write": io.get("write", 0),
        }


class Family:
    """The kernel adds a process that ended to the one that waited for it: its time and its I/O.

    Time is kept apart there, I/O is not: so what a worker has read would show a second time, as
    that of the training process, at the end of each epoch.

    What has been left by whom is in no file of the kernel: an agent that starts again cannot know
    it. So everything counts from the first look on, and a new agent begins anew, at 0.
    """

    def __init__(self, start_ns: int) -> None:
        """*start_ns*: when it is looked at for the first time, in nanoseconds since 1970."""
        self.start_ns = start_ns
        self._relatives: dict[tuple[int, int], Relative] = {}
        # Of those that ended or left the family, and that nobody in it has.
        self._kept = dict(NOTHING)
        # The I/O that the kernel has added to that of the process.
        self._inherited = {"read": 0, "write": 0}
        self._io_is_known = True
        self._first: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def update(
        self,
        pid: int,
        relatives: Mapping[tuple[int, int], Relative],
        elsewhere: Callable[[tuple[int, int]], bool],
        waits: bool,
    ) -> None:
        """Take over what those have left who are no longer in *relatives*.

        *elsewhere* says who lives on outside the family; *waits* is false where the process
        ignores the end of its children, whom the kernel then adds to nobody.
        """
        gone = {key[0]: each for key, each in self._relatives.items() if key not in relatives}
        for number, relative in gone.items():
            amounts = relative.amounts()
            if elsewhere((number, relative.stat.start)):
                self._keep(amounts, AMOUNTS)
                continue
            heir = relative.stat.parent
            for _ in gone:
                heir = gone[heir].stat.parent if heir in gone else heir
            # Otherwise the heir is in the family, and tells it as its own.
            if heir == pid:
                self._keep(amounts, ("read", "write") if waits else AMOUNTS)
                if waits:
                    for direction in self._inherited:
                        self._inherited[direction] += amounts[direction]
        self._relatives = {key: self._with_io(key, each) for key, each in relatives.items()}
        if relatives:
            self._io_is_known = any(each.io is not None for each in self._relatives.values())

    def own_io(self, io: Amounts) -> Amounts:
        """That of the process itself, of what the kernel says, read before its relatives were."""
        return {
            direction: self._since_first(f"own {direction}", amount - self._inherited[direction])
            for direction, amount in io.items()
        }

    def total(self, stat: ProcessStat) -> Amounts:
        """All that is known, given the line of the process itself."""
        total = {**self._kept}
        total["user"] += stat.children_user
        total["system"] += stat.children_system
        for relative in self._relatives.values():
            for name, amount in relative.amounts().items():
                total[name] += amount
        known = AMOUNTS if self._io_is_known else ("user", "system")
        return {name: self._since_first(name, total[name]) for name in known}

    def _since_first(self, name: str, amount: int) -> int:
        """How much has come since the first look; it never falls."""
        grown = amount - self._first.setdefault(name, amount)
        # One that ends while we read may be missing on both sides until the next time.
        self._told[name] = max(grown, self._told.get(name, 0))
        return self._told[name]

    def _with_io(self, key: tuple[int, int], relative: Relative) -> Relative:
        """With what was known of one that ended between its two files."""
        before = self._relatives.get(key)
        return relative._replace(io=before.io) if before and relative.io is None else relative

    def _keep(self, amounts: Amounts, names: tuple[str, ...]) -> None:
        for name in names:
            self._kept[name] += amounts[name]
