"""Brings the same step of all ranks of a node together, whatever each of them calls it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from otel_ddp.diagnosis.facts import StepFacts, middle
from otel_ddp.diagnosis.verdict import Who

# Steps that wait for a rank to tell of them. The agent reads one process after the other, so one
# may be far ahead; what is further behind than this is not waited for.
_MOST_WAITING = 1000
# So many steps of every rank without one in common: their numbers are not of one count.
_STRANGE_AFTER = 50
_SILENT_AFTER = 200
_REMEMBERED = 256


class Row(NamedTuple):
    """One step of every rank, in the order of `Alignment.ranks`."""

    number: int
    facts: tuple[StepFacts, ...]


class _Rank:
    """One rank, and how far it has come."""

    __slots__ = ("place", "seen", "shift", "since_row", "trail")

    def __init__(self) -> None:
        self.seen = 0
        # Which one of the ranks it is.
        self.place = 0
        # What is added to its numbers to have those of the first rank.
        self.shift = 0
        # Its steps since the last one that all ranks had told of.
        self.since_row = 0
        self.trail: deque[StepFacts] = deque(maxlen=_REMEMBERED)


class Alignment:
    """The ranks of one run on one node, and their steps that are not told by all yet."""

    def __init__(self) -> None:
        self.ranks: list[Who] = []
        self._ranks: dict[Who, _Rank] = {}
        # By number, then by place.
        self._waiting: defaultdict[int, dict[int, StepFacts]] = defaultdict(dict)
        self._in_common = 1.0

    def join(self, who: Who) -> bool:
        """True where the rank is a new one; steps that it has no part in are compared no more."""
        if who in self._ranks:
            return False
        self._ranks[who] = _Rank()
        self._reorder()
        return True

    def leave(self, who: Who) -> None:
        """A rank is gone, and not waited for."""
        if self._ranks.pop(who, None):
            self._reorder()

    def _reorder(self) -> None:
        self.ranks = sorted(self._ranks, key=_order)
        self._waiting.clear()
        self._in_common = 1.0
        for place, who in enumerate(self.ranks):
            rank = self._ranks[who]
            rank.place, rank.since_row = place, 0

    def feed(self, who: Who, steps: Sequence[StepFacts], left_out: int) -> list[Row]:
        """The steps of all ranks that these were the last to tell of, but for its first ones."""
        rank = self._ranks[who]
        rank.trail.extend(steps)
        rows = []
        # This is done for every step of every rank.
        waiting, place, count = self._waiting, rank.place, len(self._ranks)
        for seen, facts in enumerate(steps, rank.seen + 1):
            rank.since_row += 1
            number = facts.number + rank.shift
            told = waiting[number]
            told[place] = facts
            if len(told) == count:
                row = self._complete(number, told)
                if row is not None and seen > left_out:
                    rows.append(row)
                continue
            if len(waiting) > _MOST_WAITING:
                self._give_up(next(iter(waiting)))
            if rank.since_row % _STRANGE_AFTER == 0 and self._strangers():
                self._renumber()
        rank.seen += len(steps)
        return rows

    def _complete(self, number: int, told: Mapping[int, StepFacts]) -> Row | None:
        waiting = self._waiting
        del waiting[number]
        while waiting and (oldest := next(iter(waiting))) < number:
            self._give_up(oldest)
        row = Row(number, tuple(map(told.__getitem__, range(len(told)))))
        if not _at_one_time(row.facts):
            self._in_common *= 0.99
            return None
        self._in_common = 0.99 * self._in_common + 0.01
        for each in self._ranks.values():
            each.since_row = 0
        return row

    def _give_up(self, number: int) -> None:
        del self._waiting[number]
        self._in_common *= 0.99

    def _strangers(self) -> bool:
        return all(rank.since_row >= _STRANGE_AFTER for rank in self._ranks.values())

    def _renumber(self) -> None:
        """Where ranks count differently, as when rank 0 alone logs, the clock says what is what."""
        first, *others = (self._ranks[who] for who in self.ranks)
        for rank in others:
            shift = shift_by_clock(first.trail, rank.trail)
            if shift is not None and shift != rank.shift:
                rank.shift = shift
                self._waiting.clear()

    def trouble(self) -> str:
        """Why nothing can be said about who is late; empty where it can."""
        if len(self._ranks) < 2:
            return "one rank on this node, nobody to compare it with"
        if self._strangers():
            return "the step numbers of the ranks do not match"
        most = max(rank.since_row for rank in self._ranks.values())
        silent = [
            dict(who).get("rank", "?") for who in self.ranks if not self._ranks[who].since_row
        ]
        if most >= _SILENT_AFTER and silent:
            return f"nothing is heard of rank {', '.join(silent)}"
        if self._in_common < 0.5:
            return "most steps are not told by all ranks"
        return ""


def shift_by_clock(first: Sequence[StepFacts], steps: Sequence[StepFacts]) -> int | None:
    """What is to be added to a rank's numbers to have those of the first one, if that is known."""
    numbers = [each.number for each in first]
    times = [each.ended_ns for each in first]
    if steps[-1].ended_ns < times[0] or times[-1] < steps[0].ended_ns:
        return None
    half_a_step = middle([after - before for before, after in pairwise(times)]) / 2
    found: Counter[int] = Counter()
    for facts in steps:
        number, ended_ns = facts.number, facts.ended_ns
        after = bisect_left(times, ended_ns)
        near = min(
            (i for i in (after - 1, after) if 0 <= i < len(times)),
            key=lambda i: abs(times[i] - ended_ns),
        )
        if abs(times[near] - ended_ns) <= half_a_step:
            found[numbers[near] - number] += 1
    return found.most_common(1)[0][0] if found else None


def _order(who: Who) -> tuple[int, str]:
    rank = dict(who).get("rank", "")
    return (int(rank) if rank.isdecimal() else 1 << 62), rank


def _at_one_time(facts: tuple[StepFacts, ...]) -> bool:
    """Ranks that wait for each other end a step at about one time; else it is not one step."""
    ends_ns = sorted([each.ended_ns for each in facts])
    apart_ns = ends_ns[-1] - ends_ns[0] - 100_000_000
    return apart_ns <= 0 or apart_ns <= 2 * max(each.took_ns for each in facts)
