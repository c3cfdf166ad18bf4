"""The last steps of all ranks: how much longer than the others each rank worked, and its cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.alignment import Row
from otel_ddp.diagnosis.verdict import Labels

_MOST_STEPS = limits.LENGTHS[-1]


class ExcessHistory:
    """The excess of each rank over the median of the others, in nanoseconds, step by step."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=_MOST_STEPS)
        self._excesses_ns: deque[list[float]] = deque(maxlen=_MOST_STEPS)
        self._steps_ns: deque[float] = deque(maxlen=_MOST_STEPS)
        # The same excesses by rank, made when they are first asked for.
        self._by_rank: list[tuple[float, ...]] = []
        # The steps since the last full stride.
        self._fresh: list[list[float]] = []
        # By rank and stride: in how many steps the rank was above the others.
        self._above: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._excesses_ns)

    def append(self, row: Row, excesses_ns: list[float], step_ns: float) -> bool:
        """Add one step of all ranks; True when it completes a stride."""
        self._rows.append(row)
        self._excesses_ns.append(excesses_ns)
        self._steps_ns.append(step_ns)
        self._by_rank.clear()
        self._fresh.append(excesses_ns)
        if len(self._fresh) < limits.STRIDE:
            return False
        self._above = self._above or [[] for _ in excesses_ns]
        for counts, excess_ns in zip(self._above, zip(*self._fresh, strict=True), strict=True):
            counts.append(_count_above(excess_ns))
            del counts[: -_MOST_STEPS // limits.STRIDE]
        self._fresh.clear()
        return True

    def clear(self) -> None:
        """Forget all steps: the ranks or the compared phases are others now."""
        self._rows.clear()
        self._excesses_ns.clear()
        self._steps_ns.clear()
        self._by_rank.clear()
        self._fresh.clear()
        self._above.clear()

    def above_counts(self, i: int) -> Sequence[int]:
        """For each of the last strides: in how many steps rank *i* was above the others."""
        return self._above[i]

    def excess_ns(self, i: int, length: int) -> tuple[float, ...]:
        """The last excesses of rank *i*."""
        if not self._by_rank:
            self._by_rank = list(zip(*self._excesses_ns, strict=True))
        return self._by_rank[i][-length:]

    def waits_ns(self, i: int, length: int) -> list[int]:
        """How long rank *i* waited for others in each of the last steps."""
        return [row.facts[i].wait_ns for row in self.rows(length)]

    def rows(self, length: int) -> list[Row]:
        """The last steps themselves."""
        return list(islice(self._rows, max(len(self._rows) - length, 0), None))

    def steps_ns(self, length: int) -> list[float]:
        """The last step times."""
        return list(islice(self._steps_ns, max(len(self._steps_ns) - length, 0), None))

    def excess_s(self, i: int, length: int) -> float:
        """The median excess of rank *i* over the last steps, in seconds."""
        return median(self.excess_ns(i, length)) / 1e9

    def step_s(self, length: int) -> float:
        """The median time of the last steps, in seconds."""
        return median(self.steps_ns(length)) / 1e9

    def share_above(self, i: int, length: int) -> float:
        """The share of the last steps in which rank *i* was above the others."""
        return _count_above(self.excess_ns(i, length)) / length


def _count_above(excesses: Sequence[float]) -> int:
    return [each > 0 for each in excesses].count(True)


# -- what the other ranks of a job have waited for each late rank


class LostTime:
    """Seconds that were lost to each rank. They stay when its verdict is over."""

    def __init__(self) -> None:
        self.lost_s: dict[Labels, float] = {}
        self.steps_each = 1.0
        """How many steps each step stands for, where only some of them are compared."""

    def charge(self, labels: Labels, wait_s: float, steps: int, others: int) -> None:
        """So many *others* have waited *wait_s* for this rank, in each of so many steps."""
        more_s = wait_s * steps * self.steps_each * others
        self.lost_s[labels] = self.lost_s.get(labels, 0.0) + more_s


def share_s(i: int, late_s: Mapping[int, float]) -> float:
    """The wait per step that rank *i* answers for.

    The others wait for the latest rank only. Where several are late, they share that wait in
    proportion to their excesses, which *late_s* has by rank.
    """
    return part(i, late_s) * latest_s(late_s.values())


def part(i: int, late_s: Mapping[int, float]) -> float:
    """The share of rank *i* in the excesses of all late ranks."""
    total_s = sum(max(each_s, 0.0) for each_s in late_s.values())
    return max(late_s[i], 0.0) / total_s if total_s else 0.0


def latest_s(excesses_s: Collection[float]) -> float:
    """The excess of the latest rank."""
    return max([0.0, *excesses_s])
