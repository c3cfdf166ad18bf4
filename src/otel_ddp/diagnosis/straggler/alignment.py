"""Brings together the same step of all ranks of a run, by its number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.say import rank_numbers
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Labels


class Row(NamedTuple):
    """One step of every rank, in the order of `Alignment.ranks`."""

    number: int
    facts: Sequence[StepFacts]
    first: bool = False
    """It holds one of the first steps of a process: those are like no others."""


class _Rank:
    """One rank, and how far it has come."""

    __slots__ = ("labels", "seen", "since_row")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.seen = 0
        # Its steps since the last complete row.
        self.since_row = 0


class Alignment:
    """The ranks of one run, and the steps that some ranks have yet to report."""

    def __init__(self) -> None:
        self._ranks: dict[Labels, _Rank] = {}
        # In their order, once it is asked for: thousands of ranks come one after the other.
        self._ordered: list[_Rank] = []
        # Those with steps since the last complete row.
        self._ahead: set[_Rank] = set()
        # By step number, then by the rank.
        self._waiting: defaultdict[int, dict[_Rank, StepFacts]] = defaultdict(dict)
        self._share_in_common = 1.0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, labels: Labels) -> bool:
        return labels in self._ranks

    @property
    def ranks(self) -> list[Labels]:
        """Those whose steps are put side by side, in their order."""
        return [each.labels for each in self._in_order()]

    def _in_order(self) -> list[_Rank]:
        if len(self._ordered) != len(self._ranks):
            self._ordered = [self._ranks[labels] for labels in sorted(self._ranks, key=_order)]
        return self._ordered

    def add(self, labels: Labels) -> bool:
        """True where the rank is new. Steps without it are then no longer compared."""
        if labels in self._ranks:
            return False
        self._ranks[labels] = _Rank(labels)
        self._start_again()
        return True

    def remove(self, labels: Labels) -> None:
        """The rank has ended, and no step waits for it."""
        if self._ranks.pop(labels, None):
            self._start_again()

    def _start_again(self) -> None:
        self._ordered = []
        self._waiting.clear()
        self._share_in_common = 1.0
        self._begin_row()

    def _begin_row(self) -> None:
        for rank in self._ahead:
            rank.since_row = 0
        self._ahead.clear()

    def feed(self, labels: Labels, steps: Sequence[StepFacts]) -> list[Row]:
        """Add steps of a rank; the rows that they complete."""
        rank = self._ranks[labels]
        rows = []
        # This runs for every step of every rank.
        waiting, count = self._waiting, len(self._ranks)
        for seen, facts in enumerate(steps, rank.seen + 1):
            self._ahead.add(rank)
            rank.since_row += 1
            by_rank = waiting[facts.number]
            by_rank[rank] = facts
            if len(by_rank) == count:
                row = self._complete(facts.number, by_rank)
                if row is not None:
                    rows.append(row._replace(first=seen <= limits.FIRST_STEPS))
            elif len(waiting) > limits.MOST_WAITING:
                self._give_up(next(iter(waiting)))
        rank.seen += len(steps)
        return rows

    def _complete(self, number: int, by_rank: Mapping[_Rank, StepFacts]) -> Row | None:
        waiting = self._waiting
        del waiting[number]
        while waiting and (oldest := next(iter(waiting))) < number:
            self._give_up(oldest)
        row = Row(number, tuple(map(by_rank.__getitem__, self._in_order())))
        if not _at_one_time(row.facts):
            self._share_in_common *= 0.99
            return None
        self._share_in_common = 0.99 * self._share_in_common + 0.01
        self._begin_row()
        return row

    def _give_up(self, number: int) -> None:
        del self._waiting[number]
        self._share_in_common *= 0.99

    def why_not_comparable(self) -> str:
        """Why the ranks cannot be compared; empty where they can."""
        if len(self._ranks) < 2:
            return "fewer than two known ranks are at work"
        since_row = [rank.since_row for rank in self._ranks.values()]
        if min(since_row) >= limits.COUNT_DIFFERENTLY_AFTER:
            return "the step numbers of the ranks do not match"
        silent = [each.labels for each in self._in_order() if not each.since_row]
        if max(since_row) >= limits.SILENT_AFTER and silent:
            return f"no steps any more from rank {rank_numbers(silent)}"
        if self._share_in_common < limits.LEAST_IN_COMMON:
            return "for most steps, the records of some ranks are missing"
        return ""


def _order(labels: Labels) -> tuple[int, str]:
    rank = dict(labels).get("rank", "")
    return (int(rank) if rank.isdecimal() else 1 << 62), rank


def _at_one_time(facts: Sequence[StepFacts]) -> bool:
    """Ranks that wait for each other end a step at about one time; else these are not one step."""
    ends_ns = [each.ended_ns for each in facts]
    apart_ns = max(ends_ns) - min(ends_ns) - 100_000_000
    return apart_ns <= 0 or apart_ns <= 2 * max(each.took_ns for each in facts)
