"""The last steps: how much longer than the others each rank or node worked, and its cost."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import islice
from math import ceil, log2
from typing import TypeVar

from otel_ddp.diagnosis.medians import excesses, median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.alignment import Row
from otel_ddp.diagnosis.straggler.units import Unit
from otel_ddp.diagnosis.verdict import Labels

_MOST_STEPS = limits.LENGTHS[-1]
_Key = TypeVar("_Key", bound=Hashable)
_Each = TypeVar("_Each")


class ExcessHistory:
    """The excess of each unit over the median of the others, in nanoseconds, step by step.

    A node counts with the median of its ranks.
    """

    def __init__(self) -> None:
        self.units: Sequence[Unit] = ()
        self._left_out: tuple[int, ...] = ()
        self._rows: deque[Row] = deque(maxlen=_MOST_STEPS)
        self._excesses_ns: deque[array[float]] = deque(maxlen=_MOST_STEPS)
        self._steps_ns: deque[float] = deque(maxlen=_MOST_STEPS)
        # The steps since the last full stride.
        self._fresh: list[list[float]] = []
        # By unit and stride: in how many steps the unit was above the others.
        self._above: list[list[int]] = []
        # By unit: in how many of the last steps in a row it was far above. Empty where steps are
        # fast.
        self._in_a_row: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self._excesses_ns)

    def start_again(self, units: Sequence[Unit], left_out: tuple[int, ...]) -> None:
        """Forget all steps: other units, or other phases, are compared now.

        *left_out*: indices into WORK_PHASES, of the phases that are not compared.
        """
        self.units, self._left_out = units, left_out
        self._rows.clear()
        self._excesses_ns.clear()
        self._steps_ns.clear()
        self._fresh.clear()
        self._above.clear()
        self._in_a_row = ()

    def append(self, row: Row, works_ns: Sequence[int], step_ns: float) -> list[float]:
        """Add one step of all ranks, and what each worked in it; the excess of each unit."""
        each_ns: Sequence[float] = works_ns
        if len(self.units) < len(works_ns):
            each_ns = [median([works_ns[i] for i in unit.members]) for unit in self.units]
        found = excesses(each_ns)
        self._rows.append(row)
        self._excesses_ns.append(array("d", found))
        self._steps_ns.append(step_ns)
        self._fresh.append(found)
        if len(self._fresh) == limits.STRIDE:
            self._above = self._above or [[] for _ in found]
            for counts, excess_ns in zip(self._above, zip(*self._fresh, strict=True), strict=True):
                counts.append(_count_above(excess_ns))
                del counts[: -_MOST_STEPS // limits.STRIDE]
            self._fresh.clear()
        self._in_a_row = self._one_more(found, step_ns)
        return found

    def _one_more(self, excesses_ns: Sequence[float], step_ns: float) -> Sequence[int]:
        if step_ns * self._apart * limits.LENGTHS[0] <= limits.SOON_NS:
            return ()
        least_ns = limits.EXCESS_PER_WINDOW * step_ns
        before = self._in_a_row or [0] * len(excesses_ns)
        return [
            steps + 1 if ns > least_ns else 0 for steps, ns in zip(before, excesses_ns, strict=True)
        ]

    @property
    def soon(self) -> int:
        """How many steps show a clear case: fewer than the rule takes, where steps are slow."""
        if not self._in_a_row:
            return limits.LENGTHS[0]
        step_ns = self._apart * median(self.steps_ns(limits.SOON_FEWEST))
        steps = ceil(limits.SOON_NS / step_ns)
        return min(max(steps, limits.SOON_FEWEST), limits.LENGTHS[0])

    @property
    def _apart(self) -> float:
        """How far apart the last steps lie."""
        return self.stand_for(limits.SOON_FEWEST) / min(len(self), limits.SOON_FEWEST)

    def stand_for(self, length: int) -> int:
        """How many steps the last ones stand for."""
        return sum([row.steps for row in self.rows(length)]) if length else 0

    def one_of(self, length: int) -> int:
        """Of how many steps one is measured: a power of two."""
        return 1 << round(log2(self.stand_for(length) / length))

    def far_above(self, i: int) -> int:
        """In how many of the last steps, one after the other, unit *i* was far above the others."""
        return self._in_a_row[i] if self._in_a_row else 0

    @property
    def is_any_far_above(self) -> bool:
        """Whether a unit has just been far above the others for as long as shows a clear case."""
        return bool(self._in_a_row) and self.soon in self._in_a_row

    @property
    def is_at_stride(self) -> bool:
        """Whether the last step has completed a stride."""
        return not self._fresh and bool(self._rows)

    def above_counts(self, i: int) -> Sequence[int]:
        """For each of the last strides: in how many steps unit *i* was above the others."""
        return self._above[i]

    def excess_ns(self, i: int, length: int) -> list[float]:
        """The last excesses of unit *i*."""
        start = max(len(self._excesses_ns) - length, 0)
        return [each[i] for each in islice(self._excesses_ns, start, None)]

    def waits_ns(self, i: int, length: int) -> list[float]:
        """How long unit *i* waited for others in each of the last steps."""
        members = self.units[i].members
        return [median([row.facts[at].wait_ns for at in members]) for row in self.rows(length)]

    def rank_excesses_ns(
        self, i: int, ranks: Sequence[int], length: int
    ) -> list[tuple[float, ...]]:
        """How much longer than the typical other node each of these ranks worked, step by step.

        *i*: the node that the others are other than.
        """
        members = self.units[i].members
        found = []
        for row, excess_ns in zip(self.rows(length), self.excess_ns(i, length), strict=True):
            own_ns = works_ns([row.facts[at] for at in members], self._left_out)
            typical_ns = median(own_ns) - excess_ns
            facts = [row.facts[at] for at in ranks]
            found.append([each - typical_ns for each in works_ns(facts, self._left_out)])
        return list(zip(*found, strict=True))

    def step_without_s(self, late: Collection[int], length: int) -> float:
        """What a step would take without these ranks: the latest of the others ends it then."""
        found = []
        steps_ns = self._some(self.steps_ns(length))
        for row, step_ns in zip(self.some_rows(length), steps_ns, strict=True):
            all_ns = works_ns(row.facts, self._left_out)
            others_ns = [each for at, each in enumerate(all_ns) if at not in late]
            found.append(step_ns - max(all_ns) + max(others_ns, default=0))
        return median(found) / 1e9

    def rows(self, length: int) -> list[Row]:
        """The last steps themselves."""
        return list(islice(self._rows, max(len(self._rows) - length, 0), None))

    def some_rows(self, length: int) -> list[Row]:
        """Some of the last steps, which say the same as all; the last one first."""
        return self._some(self.rows(length))

    def _some(self, each_step: list[_Each]) -> list[_Each]:
        return each_step[:: -3 if len(self.units) < limits.MANY_RANKS else -9]

    def steps_ns(self, length: int) -> list[float]:
        """The last step times."""
        return list(islice(self._steps_ns, max(len(self._steps_ns) - length, 0), None))

    def excess_s(self, i: int, length: int) -> float:
        """The median excess of unit *i* over the last steps, in seconds."""
        return median(self.excess_ns(i, length)) / 1e9

    def step_s(self, length: int) -> float:
        """The median time of the last steps, in seconds."""
        return median(self.steps_ns(length)) / 1e9

    def share_above(self, i: int, length: int) -> float:
        """The share of the last steps in which unit *i* was above the others."""
        return _count_above(self.excess_ns(i, length)) / length


def works_ns(facts: Sequence[StepFacts], left_out: Sequence[int]) -> list[int]:
    """What each rank worked in a step, without the phases that are not compared."""
    found = [each.took_ns - each.wait_ns for each in facts]
    for at in left_out:
        found = [ns - each.phases_ns[at] for ns, each in zip(found, facts, strict=True)]
    return found


def _count_above(excesses: Sequence[float]) -> int:
    return [each > 0 for each in excesses].count(True)


# -- what the other ranks of a job have waited for each late rank


class LostTime:
    """Seconds that were lost to each rank. They stay when its verdict is over."""

    def __init__(self) -> None:
        self.lost_s: dict[Labels, float] = {}
        self.steps_each = 1.0
        """How many steps each step stands for, where samples of them are fed."""

    def charge(self, ranks: Sequence[Labels], wait_s: float, steps: int, others: int) -> float:
        """So many *others* have waited *wait_s* for these ranks, in each of so many steps.

        They answer for it in equal parts; what it is in all.
        """
        more_s = wait_s * steps * self.steps_each * others
        for labels in ranks:
            self.lost_s[labels] = self.lost_s.get(labels, 0.0) + more_s / len(ranks)
        return more_s


def share_s(one: _Key, late_s: Mapping[_Key, float]) -> float:
    """The wait per step that this late unit answers for.

    The others wait for the latest one only. Where several are late, they share that wait in
    proportion to their excesses, which *late_s* has.
    """
    return part(one, late_s) * latest_s(late_s.values())


def part(one: _Key, late_s: Mapping[_Key, float]) -> float:
    """The share of this late unit in the excesses of all late ones."""
    total_s = sum(max(each_s, 0.0) for each_s in late_s.values())
    return max(late_s[one], 0.0) / total_s if total_s else 0.0


def latest_s(excesses_s: Collection[float]) -> float:
    """The excess of the latest one."""
    return max([0.0, *excesses_s])
