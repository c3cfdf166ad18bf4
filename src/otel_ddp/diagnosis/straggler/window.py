"""Aligns the steps of all ranks; stores the excess of each rank and node in the last steps."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from math import ceil, log2
from operator import sub
from typing import Any, NamedTuple

from otel_ddp.diagnosis.medians import excesses_within, median
from otel_ddp.diagnosis.say import rank_numbers, rank_order
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Labels, node_of

# -- alignment, by the number of the step


class Row(NamedTuple):
    """One step of every rank, in the order of `Alignment.ranks`."""

    number: int
    facts: Sequence[StepFacts]
    first: bool = False
    """Whether this is one of the first steps of some process, which are not compared."""


class _Rank:
    """The progress of one rank."""

    __slots__ = ("labels", "seen", "since_row")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.seen = 0
        # How many of its steps have been read since the last complete row.
        self.since_row = 0


class Alignment:
    """Joins the steps of all ranks into rows."""

    def __init__(self) -> None:
        self._ranks: dict[Labels, _Rank] = {}
        # The ranks in order; empty until somebody needs it. Sorting at each change would take too
        # long, as thousands of ranks are added one by one.
        self._ordered: list[_Rank] = []
        # By step number: the steps of rows for which other ranks' steps are still missing.
        self._waiting: defaultdict[int, dict[_Rank, StepFacts]] = defaultdict(dict)
        self._share_in_common = 1.0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, labels: Labels) -> bool:
        return labels in self._ranks

    @property
    def ranks(self) -> list[Labels]:
        """The ranks, in the order of rows."""
        return [each.labels for each in self._in_order()]

    def _in_order(self) -> list[_Rank]:
        if len(self._ordered) != len(self._ranks):
            self._ordered = [self._ranks[labels] for labels in sorted(self._ranks, key=rank_order)]
        return self._ordered

    def add(self, labels: Labels) -> bool:
        """Include the rank in all further rows. Returns True if it was not included yet."""
        if labels in self._ranks:
            return False
        self._ranks[labels] = _Rank(labels)
        self._start_again()
        return True

    def remove(self, labels: Labels) -> None:
        """Leave the rank out of all further rows."""
        if self._ranks.pop(labels, None):
            self._start_again()

    def _start_again(self) -> None:
        self._ordered = []
        self._waiting.clear()
        self._share_in_common = 1.0
        self._begin_row()

    def _begin_row(self) -> None:
        for rank in self._ranks.values():
            rank.since_row = 0

    def feed(self, labels: Labels, steps: Sequence[StepFacts]) -> list[Row]:
        """Add steps of a rank; returns the rows that they complete."""
        rank = self._ranks[labels]
        rows = []
        # This loop runs for every step of every rank, so it must be fast.
        waiting, count = self._waiting, len(self._ranks)
        for seen, facts in enumerate(steps, rank.seen + 1):
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
        """Why the ranks cannot be compared; empty if they can."""
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


def _at_one_time(facts: Sequence[StepFacts]) -> bool:
    """Whether these steps may be one step of all ranks: they then end at about the same time, since
    ranks wait for each other."""
    ends_ns = [each.ended_ns for each in facts]
    apart_ns = max(ends_ns) - min(ends_ns) - 100_000_000
    return apart_ns <= 0 or apart_ns <= 2 * max(each.took_ns for each in facts)


# -- the last steps, as columns

_MOST_STEPS = limits.LENGTHS[-1]
_Column = Sequence[int]
"""One value per rank, in the order of `Alignment.ranks`."""


class Compared(NamedTuple):
    """One step of all ranks."""

    number: int
    steps: int
    """How many steps this one represents: itself and the unmeasured steps before it."""
    step_ns: float
    first_ended_ns: int
    last_ended_ns: int
    took_ns: int
    works_ns: _Column
    """The work of each rank, without excluded phases."""
    waits_ns: _Column
    amounts: _Column
    phases_ns: Sequence[_Column]
    """A column for each of WORK_PHASES; `paced_ns` and `host_ns` have the same shape."""
    paced_ns: Sequence[_Column] | None
    host_ns: Sequence[_Column] | None
    behind_ns: Sequence[int | None]

    @classmethod
    def of(
        cls, number: int, columns: Any, left_out: Sequence[int], steps: int, step_ns: float
    ) -> Compared:
        """*columns*: StepFacts of all ranks. *left_out*: excluded phases."""
        return cls(
            number=number,
            steps=steps,
            step_ns=step_ns,
            first_ended_ns=min(columns.ended_ns),
            last_ended_ns=max(columns.ended_ns),
            took_ns=columns.took_ns[0],
            works_ns=_packed(works_ns(columns, left_out)),
            waits_ns=_packed(columns.wait_ns),
            amounts=_packed(columns.work),
            phases_ns=_by_phase(columns.phases_ns),
            paced_ns=_by_phase(columns.paced_ns),
            host_ns=_by_phase(columns.host_ns),
            behind_ns=_packed(columns.behind_ns),
        )


def _packed(column: Sequence[Any]) -> Sequence[Any]:
    """With very many ranks, packs the column into an array, which takes a tenth of the memory."""
    for size in "Iq" if len(column) >= limits.MANY_RANKS else "":
        # Try 4-byte integers, then 8-byte ones. If a value is None or too large for both, keep the
        # column as it is.
        with suppress(TypeError, OverflowError):
            return array(size, column)
    return column


def _by_phase(ranks: Sequence[Any]) -> Any:
    """The values of all ranks as one column for each phase; None if a rank has no values."""
    return None if None in ranks else [_packed(each) for each in zip(*ranks, strict=True)]


class Window:
    """The last measured steps of all ranks, up to the longest length that the rule looks at."""

    def __init__(self, left_out: Sequence[int] = (), stages: Sequence[int] = ()) -> None:
        """*left_out*: excluded phases, as indices into WORK_PHASES. *stages*: pipeline stages."""
        self.left_out, self.stages = left_out, stages
        self._steps: list[Compared] = []

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: Compared) -> None:
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]

    def last(self, length: int) -> list[Compared]:
        """The last steps, oldest first."""
        return self._steps[max(len(self._steps) - length, 0) :]

    def steps_ns(self, length: int) -> list[float]:
        """The durations of the last steps."""
        return [each.step_ns for each in self.last(length)]

    def step_s(self, length: int) -> float:
        """The median duration of the last steps."""
        return median(self.steps_ns(length)) / 1e9

    def stand_for(self, length: int) -> int:
        """How many steps the last *length* measured steps stand for, with the unmeasured ones
        between them."""
        return sum([each.steps for each in self.last(length)])

    def one_of(self, length: int) -> int:
        """N if about one of N steps is measured; a power of two."""
        return 1 << round(log2(self.stand_for(length) / length))

    @property
    def apart(self) -> float:
        """The mean distance between measured steps, in steps: 1 if each step is measured."""
        return self.stand_for(limits.SOON_FEWEST) / min(len(self), limits.SOON_FEWEST)


def works_ns(columns: Any, left_out: Sequence[int]) -> list[int]:
    """The work of each rank in a step, without excluded phases."""
    found = list(map(sub, columns.took_ns, columns.wait_ns))
    for at in left_out:
        found = list(map(sub, found, [each[at] for each in columns.phases_ns]))
    return found


# -- the excess of each unit


class Unit(NamedTuple):
    """A rank, or a node with all of its ranks, for comparison with others."""

    labels: Labels
    members: tuple[int, ...]
    """The indices of the unit's ranks in a row."""
    stage: int = 0
    """The pipeline stage: only units of one stage are comparable."""


def ranks_of(ranks: Sequence[Labels], stages: Sequence[int]) -> list[Unit]:
    """A unit for each rank."""
    return [
        Unit(labels, (i,), stage)
        for i, (labels, stage) in enumerate(zip(ranks, stages, strict=True))
    ]


def nodes_of(ranks: Sequence[Labels], stages: Sequence[int]) -> list[Unit]:
    """A unit for each node. Empty if nodes cannot be compared: there is only one, none has several
    ranks, or the ranks of some node are of several pipeline stages."""
    nodes: dict[Labels, list[int]] = {}
    for i, labels in enumerate(ranks):
        nodes.setdefault(node_of(labels), []).append(i)
    mixed = any(len({stages[i] for i in members}) > 1 for members in nodes.values())
    if mixed or not 1 < len(nodes) < len(ranks):
        return []
    return [Unit(labels, tuple(each), stages[each[0]]) for labels, each in nodes.items()]


def by_stage(stages: Sequence[int]) -> dict[int, list[int]]:
    """For each stage, the indices at which it occurs."""
    found: dict[int, list[int]] = {}
    for at, stage in enumerate(stages):
        found.setdefault(stage, []).append(at)
    return found


class ExcessHistory:
    """By how much each unit exceeds the median of the others, in each step of a window.

    A unit is a rank or a node; a node's work is the median of its ranks.
    """

    def __init__(self, window: Window, units: Sequence[Unit] = ()) -> None:
        self.window, self.units = window, units
        self._kinds = by_stage([unit.stage for unit in units]).values()
        self._excesses_ns: list[array[float]] = []
        # The excesses of all units in the steps since the last complete block of STRIDE steps.
        self._fresh: list[list[float]] = []
        # By unit, then by block of STRIDE steps: in how many of these steps the unit was above the
        # others.
        self.above: list[list[int]] = [[] for _ in units]
        # By unit: how many steps in a row, up to the last, it was far above the others. Empty if
        # steps are so fast that LENGTHS[0] of them take at most SOON_NS, so that no shortcut is
        # needed.
        self._in_a_row: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self._excesses_ns)

    def append(self, works_ns: Sequence[int], step_ns: float) -> list[float]:
        """Add the work of each rank in the last step; returns the excess of each unit."""
        each_ns: Sequence[float] = works_ns
        if len(self.units) < len(works_ns):
            each_ns = [median([works_ns[i] for i in unit.members]) for unit in self.units]
        found = excesses_within(each_ns, self._kinds)
        self._excesses_ns.append(array("d", found))
        del self._excesses_ns[:-_MOST_STEPS]
        self._fresh.append(found)
        if len(self._fresh) == limits.STRIDE:
            for counts, excess_ns in zip(self.above, zip(*self._fresh, strict=True), strict=True):
                counts.append(_count_above(excess_ns))
                del counts[: -_MOST_STEPS // limits.STRIDE]
            self._fresh.clear()
        self._in_a_row = self._one_more(found, step_ns)
        return found

    def _one_more(self, excesses_ns: Sequence[float], step_ns: float) -> Sequence[int]:
        if step_ns * self.window.apart * limits.LENGTHS[0] <= limits.SOON_NS:
            return ()
        least_ns = limits.EXCESS_PER_WINDOW * step_ns
        before = self._in_a_row or [0] * len(excesses_ns)
        return [
            steps + 1 if ns > least_ns else 0 for steps, ns in zip(before, excesses_ns, strict=True)
        ]

    @property
    def soon(self) -> int:
        """How many steps suffice to call a clear case late: LENGTHS[0], and fewer the slower the
        steps are."""
        if not self._in_a_row:
            return limits.LENGTHS[0]
        step_ns = self.window.apart * median(self.window.steps_ns(limits.SOON_FEWEST))
        steps = ceil(limits.SOON_NS / step_ns)
        return min(max(steps, limits.SOON_FEWEST), limits.LENGTHS[0])

    def far_above(self, i: int) -> int:
        """How many steps in a row, up to the last, unit *i* was far above the others."""
        return self._in_a_row[i] if self._in_a_row else 0

    @property
    def is_any_far_above(self) -> bool:
        """Whether some unit has now been far above the others for exactly `soon` steps, so it is
        time to look."""
        return bool(self._in_a_row) and self.soon in self._in_a_row

    @property
    def is_at_stride(self) -> bool:
        """Whether the last step completed a block of STRIDE steps."""
        return not self._fresh and bool(self._excesses_ns)

    def excess_ns(self, i: int, length: int) -> list[float]:
        """The excess of unit *i* in the last steps."""
        return [each[i] for each in self._excesses_ns[max(len(self) - length, 0) :]]

    def waits_ns(self, i: int, length: int) -> list[float]:
        """The waits of unit *i* in the last steps."""
        members = self.units[i].members
        return [median([each.waits_ns[at] for at in members]) for each in self.window.last(length)]

    def rank_excesses_ns(
        self, i: int, ranks: Sequence[int], length: int
    ) -> list[tuple[float, ...]]:
        """For each of these ranks: its excess over the nodes other than *i*, in each of the last
        steps."""
        members = self.units[i].members
        found = []
        for step, excess_ns in zip(
            self.window.last(length), self.excess_ns(i, length), strict=True
        ):
            typical_ns = median([step.works_ns[at] for at in members]) - excess_ns
            found.append([step.works_ns[at] - typical_ns for at in ranks])
        return list(zip(*found, strict=True))

    def some_steps(self, length: int) -> list[Compared]:
        """Every third of the last steps, with very many ranks every ninth; latest first."""
        return self.window.last(length)[:: -3 if len(self.units) < limits.MANY_RANKS else -9]

    def step_without_s(self, late: Set[int], length: int) -> float:
        """The estimated duration of a step if these ranks were not late."""
        kinds = [at for at in by_stage(self.window.stages).values() if not late.isdisjoint(at)]
        found = []
        for each in self.some_steps(length):
            gains_ns = [0]
            for places in kinds:
                others_ns = [each.works_ns[at] for at in places if at not in late]
                most_ns = max([each.works_ns[at] for at in places])
                gains_ns.append(most_ns - max(others_ns, default=0))
            found.append(each.step_ns - max(gains_ns))
        return median(found) / 1e9

    def excess_s(self, i: int, length: int) -> float:
        """The median excess of unit *i* over the last steps, in seconds."""
        return median(self.excess_ns(i, length)) / 1e9

    def late_for(self, i: int, length: int) -> int:
        """For how many of the last *length* steps unit *i* has been late.

        It counts as late from the first step whose excess is above half of the median excess,
        provided that the median of the STRIDE steps from there is too.
        """
        excess_ns = self.excess_ns(i, length)
        least_ns = median(excess_ns) / 2
        for at, each_ns in enumerate(excess_ns):
            if each_ns > least_ns and median(excess_ns[at : at + limits.STRIDE]) > least_ns:
                return len(excess_ns) - at
        return len(excess_ns)

    def share_above(self, i: int, length: int) -> float:
        """The share of the last steps in which unit *i* was above the others."""
        return _count_above(self.excess_ns(i, length)) / length


def _count_above(excesses: Sequence[float]) -> int:
    return [each > 0 for each in excesses].count(True)


class Late(NamedTuple):
    """A late rank or node: its index in the history, and how many of the last steps show this."""

    history: ExcessHistory
    i: int
    length: int

    @property
    def labels(self) -> Labels:
        return self.history.units[self.i].labels

    @property
    def members(self) -> tuple[int, ...]:
        return self.history.units[self.i].members

    def excess_s(self, length: int = 0) -> float:
        return self.history.excess_s(self.i, length or self.length)

    def is_late(self, steps: int, least: float) -> bool:
        """Whether the excess in the last *steps* steps is at least this share of a step."""
        return self.excess_s(steps) >= least * self.history.window.step_s(steps)
