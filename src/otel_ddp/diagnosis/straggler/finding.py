"""What is found of ranks: a late one in words and evidence, and how all compare now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp.diagnosis.say import duration, percent, rank_name, rounded
from otel_ddp.diagnosis.verdict import Labels, Verdict
from otel_ddp.vocabulary.words import COMPUTE_PHASES, PHASE, WORK_PHASES, Kind, shown_phase

_ADVICE = {
    **{word: PHASE[word].advice for word in WORK_PHASES},
    "compute": "Look at this rank's device: clocks, heat, power, other users of it.",
    "mixed": "Look at what else runs on this rank's cores and device.",
    "imbalance": "Look at how batches are divided among the ranks.",
}
# Better advice in these phases, where it is known which side is late. On the host: its device is
# idle meanwhile, or has no more to do than was launched at the moment.
_KERNELS = ("forward", "backward", "optimizer", "compute", "mixed")
_ADVICE_BY_SIDE = {
    "host": "Its device waits for launches: look at this rank's cores, at what else runs on them, "
    "and at its garbage collection.",
    "device": "The device itself is slower: look at its clocks, heat, power, and other users of "
    "it.",
    "unclear": "Its host launches late, or its device is slower: which one is not known. Look at "
    "this rank's cores, and at its device's clocks and heat.",
}


def side_of(verdict: Verdict) -> str:
    """Which side of a late rank is late, as its verdict says."""
    return str(verdict.evidence.get("side", ""))


class Finding(NamedTuple):
    """One late rank, in numbers."""

    labels: Labels
    kind: Kind
    phase: str
    excess_s: float
    """What it needs more than the others, per step."""
    step_s: float
    work_s: float
    excess_by_phase: dict[str, float]
    more_to_do: float
    """More tokens or samples than the others have, as a share of theirs."""
    steps: int
    """The steps that all of this is taken from."""
    share_above: float
    lost_per_s: float
    """Seconds that all others together lose in each second."""
    others: int
    not_compared: list[str]
    side: str
    """`device`, `host`, or `unclear`, whichever is late; empty where no device's clock is known."""

    def evidence(self) -> dict[str, Any]:
        """The numbers as they are exported."""
        step_s = self.step_s
        shares = {word: each / step_s for word, each in self.excess_by_phase.items()}
        evidence: dict[str, Any] = {
            "excess_s": round(self.excess_s, 6),
            "excess": round(self.excess_s / step_s, 4),
            "step_s": round(step_s, 6),
            "work_s": round(self.work_s, 6),
            "excess_by_phase": rounded(shares),
            "steps": self.steps,
            "steps_above_others": round(self.share_above, 3),
            "lost_per_s": round(self.lost_per_s, 4),
            "clock": "device" if self.side else "host",
        }
        if self.side:
            evidence["side"] = self.side
        if self.not_compared:
            evidence["not_compared"] = self.not_compared
        if self.kind == "imbalance":
            evidence["more_to_do"] = round(self.more_to_do, 4)
        return evidence

    def sentence(self, advice: str = "") -> str:
        """For people. *advice* replaces the usual one."""
        what = self._unequal_work() if self.kind == "imbalance" else self._lateness()
        others = "the other ranks together lose" if self.others > 1 else "the other rank loses"
        advice = advice or self._advice()
        return f"{what}; {others} {self.lost_per_s:.2g} s each second. {advice}"

    def _advice(self) -> str:
        if self.kind == "imbalance":
            return _ADVICE[self.kind]
        if self.side and self.phase in _KERNELS:
            return _ADVICE_BY_SIDE[self.side]
        return _ADVICE[self.phase]

    @property
    def _size(self) -> str:
        return f"{percent(self.excess_s / self.step_s)} of a step of {duration(self.step_s)}"

    def _unequal_work(self) -> str:
        return (
            f"work is unequal: {rank_name(self.labels)} has {percent(self.more_to_do)} more tokens "
            f"or samples than the others and needs {duration(self.excess_s)} longer, {self._size}"
        )

    def _lateness(self) -> str:
        by_phase = self.excess_by_phase
        if self.phase == "mixed":
            longer = duration(self.excess_s)
            where = f"its work takes {longer} longer than on the others, in several phases"
        elif self.phase == "compute":
            longer = duration(max(sum(by_phase.get(word, 0.0) for word in COMPUTE_PHASES), 0.0))
            where = (
                f"forward, backward and the optimizer together take {longer} longer than on the "
                "others"
            )
        else:
            longer = duration(max(by_phase.get(self.phase, self.excess_s), 0.0))
            name = shown_phase(self.phase)
            where = f"{name} takes {longer} longer than on the others"
        return (
            f"{rank_name(self.labels)} keeps the others waiting: {where}; in total it is late by "
            f"{self._size}"
        )


class RankReport(NamedTuple):
    """How one rank compares with the others."""

    labels: Labels
    excess: Mapping[str, float]
    """More time than the others need, as shares of the median step, by phase, and `all`.

    Phases with collectives of the user's own are not in it.
    """
    lost_s: float
    """What the other ranks of the job have waited for it while there were verdicts on it."""


class Report(NamedTuple):
    """All ranks of a run on this node."""

    ranks: tuple[RankReport, ...]
    """Also ranks that have ended and have cost something."""
    work_max_s: float | None
    """The work of the rank that needs the most."""
    work_median_s: float | None
    insufficient: str
    """`insufficient data: ...` where the ranks cannot be compared.

    Then the absence of a verdict means nothing.
    """
