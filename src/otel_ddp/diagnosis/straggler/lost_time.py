"""Adds up what the other ranks of a job have waited for each late rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from otel_ddp.diagnosis.verdict import Labels


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
