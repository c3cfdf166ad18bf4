"""What is found of ranks and nodes: a late one in words and evidence, and how all compare now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import duration, percent, rank_number, rounded, unit_name
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable
from otel_ddp.diagnosis.straggler.window import Late
from otel_ddp.diagnosis.verdict import Labels, Verdict, node_of
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
_ADVICE_WHERE_IT_WAITS = (
    "Its host alone waits for its device in each step, as `.item()`, printing a loss or a "
    "synchronisation makes it, and its device idles until more is launched: ask more rarely."
)
# Of a node: what its ranks have in common.
_NODE_ADVICE = {
    "data": "Look at this node's storage and network, and at the cores that its loaders have.",
    "other": "Look at this node's cores, network and storage: copies, logging, what else runs on "
    "it.",
    "imbalance": _ADVICE["imbalance"],
}
_NODE_ADVICE_BY_SIDE = {
    "host": "Their devices wait for launches: look at this node's processors: clocks, power "
    "settings, what else runs on it.",
    "device": "The devices themselves are slower: look at this node's cooling, power and clocks, "
    "and at other users of its devices.",
}
_USUAL_NODE_ADVICE = "Look at this node's clocks, heat, power, and at what else runs on it."


def side_of(verdict: Verdict) -> str:
    """Which side of a late rank is late, as its verdict says."""
    return str(verdict.evidence.get("side", ""))


def is_about(verdict: Verdict, rank: Labels) -> bool:
    """Whether this rank is late by a verdict on it, or by one on its node."""
    ranks = verdict.evidence.get("ranks", ())
    of_node = verdict.labels == node_of(rank) and rank_number(rank) in ranks
    return of_node or verdict.labels == rank


class Finding:
    """One late rank or node, in numbers, over the steps that show it. All are per step."""

    def __init__(
        self,
        late: Late,
        reading: tuple[Kind, str],
        table: PhaseTable,
        ranks: Sequence[Labels],
        *,
        others: int,
        wait_s: float,
        step_without_s: float,
        late_ones: int,
        waits_in: str,
    ) -> None:
        """*reading*: the kind of verdict, and the phase. *table*: of the same steps. *ranks*: its
        own. *others*: how many ranks wait for it, and each for *wait_s*. *step_without_s*: a step
        without any late ones, of which there are *late_ones*. *waits_in*: in which calls the others
        wait for it; empty: that is not known."""
        history, i, length = late
        window = history.window
        self.labels, self.steps, self.one_of = late.labels, length, window.one_of(length)
        self.kind, self.phase = reading
        self.excess_s, self.step_s = late.excess_s(), window.step_s(length)
        self.share_above = history.share_above(i, length)
        self.work_s, self.excess_by_phase = table.work_s(i), table.excess_by_phase(i)
        # More tokens or samples than the others have, as a share of theirs.
        self.more_to_do = table.more_to_do(i)
        self.not_compared = [WORK_PHASES[at] for at in window.left_out]
        # `device`, `host` or `unclear`; empty where no device's clock is known.
        self.side = table.side(i, self.phase)
        # Unlike the others' hosts, its own waits for its device before the phase.
        self.waits_for_device = table.waits_alone(i, self.phase)
        # Of a node: what each of its ranks needs more than those of the typical other node.
        self.excess_by_rank: dict[Labels, float] = {}
        if len(ranks) > 1:
            each_ns = history.rank_excesses_ns(i, late.members, length)
            self.excess_by_rank = {
                labels: median(ns) / 1e9 for labels, ns in zip(ranks, each_ns, strict=True)
            }
        self.others, self.late_ones, self.step_without_s = others, late_ones, step_without_s
        self.waits_in = waits_in
        # Seconds that all others together lose in each second.
        self.lost_per_s = wait_s / self.step_s * others

    def evidence(self) -> dict[str, Any]:
        """The numbers as they are exported."""
        step_s = self.step_s
        shares = {word: each / step_s for word, each in self.excess_by_phase.items()}
        evidence: dict[str, Any] = {
            "excess_s": round(self.excess_s, 6),
            "excess": round(self.excess_s / step_s, 4),
            "step_s": round(step_s, 6),
            "step_without_s": round(self.step_without_s, 6),
            "work_s": round(self.work_s, 6),
            "excess_by_phase": rounded(shares),
            "steps": self.steps,
            "steps_above_others": round(self.share_above, 3),
            "lost_per_s": round(self.lost_per_s, 4),
            "others": self.others,
            "clock": "device" if self.side else "host",
        }
        if self.one_of > 1:
            evidence["one_of"] = self.one_of
        if self.excess_by_rank:
            by_rank = {rank_number(labels): each for labels, each in self.excess_by_rank.items()}
            evidence["ranks"] = list(by_rank)
            evidence["excess_s_by_rank"] = {rank: round(each, 6) for rank, each in by_rank.items()}
        if self.late_ones > 1:
            evidence["late_ones"] = self.late_ones
        if self.side:
            evidence["side"] = self.side
        if self.waits_for_device:
            evidence["waits_for_device"] = True
        if self.waits_in:
            evidence["waits_in"] = self.waits_in
        if self.not_compared:
            evidence["not_compared"] = self.not_compared
        if self.kind == "imbalance":
            evidence["more_to_do"] = round(self.more_to_do, 4)
        return evidence

    def sentence(self, advice: str = "") -> str:
        """For people. *advice* replaces the usual one."""
        what = self._unequal_work() if self.kind == "imbalance" else self._lateness()
        others = "the other ranks together lose" if self.others > 1 else "the other rank loses"
        cost = f"{others} {self.lost_per_s:.2g} s each second"
        if self.one_of > 1:
            cost += f" (from 1 of {self.one_of} steps)"
        where = ""
        # Where all ranks meet, that says nothing.
        if self.waits_in and not self.waits_in.endswith("all ranks"):
            where = f" Others wait for it first in {self.waits_in}."
        return f"{what}; {cost}.{self._what_if()}{where} {advice or self._advice()}"

    def _what_if(self) -> str:
        if self.step_s - self.step_without_s < limits.WHAT_IF * self.step_s:
            return ""
        late = f"the {self.late_ones} that are late"
        if self.late_ones == 1:
            late = unit_name(self.labels) if self.excess_by_rank else "it"
        without, step = duration(self.step_without_s), duration(self.step_s)
        return f" Without {late} a step would take {without} instead of {step}."

    def _advice(self) -> str:
        word = "imbalance" if self.kind == "imbalance" else self.phase
        by_side = self.kind != "imbalance" and self.side and self.phase in _KERNELS
        if not self.excess_by_rank:
            if by_side and self.waits_for_device and self.side != "device":
                return _ADVICE_WHERE_IT_WAITS
            return _ADVICE_BY_SIDE[self.side] if by_side else _ADVICE[word]
        if by_side:
            return _NODE_ADVICE_BY_SIDE.get(self.side, _USUAL_NODE_ADVICE)
        return _NODE_ADVICE.get(word, _USUAL_NODE_ADVICE)

    @property
    def _size(self) -> str:
        return f"{percent(self.excess_s / self.step_s)} of a step of {duration(self.step_s)}"

    def _unequal_work(self) -> str:
        who = unit_name(self.labels)
        if self.excess_by_rank:
            who = f"each of the {len(self.excess_by_rank)} ranks of {unit_name(self.labels)}"
        return (
            f"work is unequal: {who} has {percent(self.more_to_do)} more tokens "
            f"or samples than the others and needs {duration(self.excess_s)} longer, {self._size}"
        )

    def _lateness(self) -> str:
        if self.excess_by_rank:
            return self._lateness_of_node()
        longer = duration(self._longer_s())
        if self.phase == "mixed":
            where = f"its work takes {longer} longer than on the others, in several phases"
        elif self.phase == "compute":
            where = (
                f"forward, backward and the optimizer together take {longer} longer than on the "
                "others"
            )
        else:
            where = f"{shown_phase(self.phase)} takes {longer} longer than on the others"
        return (
            f"{unit_name(self.labels)} keeps the others waiting: {where}; in total it is late by "
            f"{self._size}"
        )

    def _lateness_of_node(self) -> str:
        where = {
            "mixed": "in several phases",
            "compute": "in forward, backward and the optimizer together",
        }.get(self.phase, f"in {shown_phase(self.phase)}")
        late_s = self.excess_by_rank
        latest = max(late_s, key=lambda labels: late_s[labels])
        how = "all alike"
        if limits.NODE_ALIKE * late_s[latest] > min(late_s.values()):
            how = f"and rank {rank_number(latest)} the most, {duration(late_s[latest])} in total"
        return (
            f"{unit_name(self.labels)} keeps the others waiting: its {len(late_s)} ranks need "
            f"{duration(self._longer_s())} longer {where}, {how}; in total they are late by "
            f"{self._size}"
        )

    def _longer_s(self) -> float:
        """By how much it needs longer in the phase that is named."""
        by_phase = self.excess_by_phase
        if self.phase == "mixed":
            return self.excess_s
        if self.phase == "compute":
            return max(sum(by_phase.get(word, 0.0) for word in COMPUTE_PHASES), 0.0)
        return max(by_phase.get(self.phase, self.excess_s), 0.0)


class RankReport(NamedTuple):
    """How one rank compares with the others."""

    labels: Labels
    excess: Mapping[str, float]
    """More time than the others need, as shares of the median step, by phase, and `all`.

    Phases with collectives of the user's own are not in it.
    """
    lost_s: float
    """What the other ranks of the job have waited for it while there were verdicts on it."""
    work_s: float | None = None
    """What it works in a step; None: it is not compared."""


class Report(NamedTuple):
    """All ranks of a run."""

    ranks: tuple[RankReport, ...]
    """Also ranks that have ended and have cost something."""
    insufficient: str
    """`insufficient data: ...` where the ranks cannot be compared.

    Then the absence of a verdict means nothing.
    """
