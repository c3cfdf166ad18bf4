"""The evidence and wording of verdicts on late ranks and nodes; the report on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from otel_ddp.diagnosis import say
from otel_ddp.diagnosis.steps import Collective
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable
from otel_ddp.diagnosis.straggler.window import Late
from otel_ddp.diagnosis.verdict import Labels, Verdict, node_of
from otel_ddp.vocabulary.words import ADVICE, COMPUTE_PHASES, WORK_PHASES, Kind

_CORES = "Look at this rank's cores: what else runs on them, how it is bound to them, their clocks."
_ADVICE = {
    **ADVICE,
    "compute": _CORES,
    "mixed": _CORES,
    "imbalance": "Look at how batches are divided among the ranks.",
}
# In these phases the advice depends on what is slow, the host or the device, if that is known.
_KERNELS = ("forward", "backward", "optimizer", "compute", "mixed")
_ADVICE_BY_SIDE = {
    "host": f"The device waits for launches. {_CORES} Or it calls `.item()` in each step.",
    "device": "The device is slower. Look at this rank's clocks, heat and power, and at what else "
    "uses the device.",
}


def side_of(verdict: Verdict) -> str:
    """What makes a rank late: its `host` or its `device`; empty if unknown."""
    return str(verdict.evidence.get("side", ""))


def is_about(verdict: Verdict, rank: Labels) -> bool:
    """Whether a verdict is on this rank or on its node."""
    ranks = verdict.evidence.get("ranks", ())
    of_node = verdict.labels == node_of(rank) and say.rank_number(rank) in ranks
    return of_node or verdict.labels == rank


def evidence_of(
    late: Late,
    reading: tuple[Kind, str],
    table: PhaseTable,
    ranks: Sequence[Labels],
    others: int,
    wait_s: float,
) -> dict[str, Any]:
    """The evidence of a verdict on a late rank or node. Times are per step.

    *reading*: the kind of verdict and the phase. *table*: the times by phase, over the steps that
    show the lateness. *ranks*: the late rank, or the ranks of the late node. *others*: how many
    ranks wait, each for *wait_s* per step.
    """
    history, i, length = late
    window, (kind, phase) = history.window, reading
    step_s = window.step_s(length)
    side = table.side(i, phase)
    shares = {word: each / step_s for word, each in table.excess_by_phase(i).items()}
    evidence: dict[str, Any] = {
        "excess_s": round(late.excess_s(), 6),
        "excess": round(late.excess_s() / step_s, 4),
        "step_s": round(step_s, 6),
        "work_s": round(table.work_s(i), 6),
        "excess_by_phase": say.rounded(shares),
        "steps": length,
        "steps_above_others": round(history.share_above(i, length), 3),
        "lost_per_s": round(wait_s / step_s * others, 4),
        "others": others,
        "clock": "device" if side else "host",
    }
    if (one_of := window.one_of(length)) > 1:
        evidence["one_of"] = one_of
    if len(ranks) > 1:
        evidence["ranks"] = list(map(say.rank_number, ranks))
    if side:
        evidence["side"] = side
    if window.left_out:
        evidence["not_compared"] = [WORK_PHASES[at] for at in window.left_out]
    if kind == "imbalance":
        evidence["more_to_do"] = round(table.more_to_do(i), 4)
    return evidence


def sentence_of(verdict: Verdict, advice: str = "") -> str:
    """The sentence of a verdict. *advice* replaces the usual advice."""
    evidence = verdict.evidence
    what = _unequal_work(verdict) if verdict.kind == "imbalance" else _lateness(verdict)
    lost = say.cost(evidence["others"], evidence["lost_per_s"])
    where, waits_in = "", evidence.get("waits_in", "")
    # Do not mention a group of all ranks: that others wait for the late rank has been said already.
    if waits_in and not waits_in.endswith("all ranks"):
        where = f" Others wait for it first in {waits_in}."
    return f"{what}; {lost}.{_what_if(verdict)}{where} {advice or _advice(verdict)}"


def _what_if(verdict: Verdict) -> str:
    evidence = verdict.evidence
    step_s, without_s = evidence["step_s"], evidence["step_without_s"]
    if step_s - without_s < limits.WHAT_IF * step_s:
        return ""
    without, step = say.duration(without_s), say.duration(step_s)
    return f" If no rank were late, a step would take {without} instead of {step}."


def _advice(verdict: Verdict) -> str:
    word = "imbalance" if verdict.kind == "imbalance" else verdict.phase
    side = side_of(verdict) if word in _KERNELS else ""
    advice = _ADVICE_BY_SIDE[side] if side else _ADVICE.get(word, "")
    return advice.replace("this rank", "this node") if "ranks" in verdict.evidence else advice


def _size(verdict: Verdict) -> str:
    step_s = verdict.evidence["step_s"]
    return (
        f"{say.percent(verdict.evidence['excess_s'] / step_s)} of a step of {say.duration(step_s)}"
    )


def _unequal_work(verdict: Verdict) -> str:
    who, evidence = say.unit_name(verdict.labels), verdict.evidence
    if ranks := evidence.get("ranks"):
        who = f"each of the {len(ranks)} ranks of {who}"
    return (
        f"work is unequal: {who} has {say.percent(evidence['more_to_do'])} more tokens "
        f"or samples than the others and needs {say.duration(evidence['excess_s'])} longer, "
        f"{_size(verdict)}"
    )


def _lateness(verdict: Verdict) -> str:
    need, late = "it needs", "it is late"
    if ranks := verdict.evidence.get("ranks"):
        need, late = f"its {len(ranks)} ranks need", "they are late"
    return (
        f"{say.unit_name(verdict.labels)} keeps the others waiting: {need} "
        f"{say.duration(_longer_s(verdict))} longer in {say.phase_in_words(verdict.phase)}; in "
        f"total {late} by {_size(verdict)}"
    )


def _longer_s(verdict: Verdict) -> float:
    """By how many seconds per step the rank or node is slower in the phase of the verdict."""
    evidence, phase = verdict.evidence, verdict.phase
    if phase == "mixed":
        return float(evidence["excess_s"])
    words = COMPUTE_PHASES if phase == "compute" else (phase,)
    shares = evidence["excess_by_phase"]
    return float(max(sum(shares.get(word, 0.0) for word in words) * evidence["step_s"], 0.0))


class RankReport(NamedTuple):
    """How one rank compares with the others."""

    labels: Labels
    excess: Mapping[str, float]
    """The excess by phase and in `all`, as shares of the median step; without excluded phases."""
    lost_s: float
    """Seconds that other ranks waited for this one during verdicts on it, summed over them."""
    work_s: float | None = None
    waits_s: Mapping[Collective, float] = MappingProxyType({})
    """How long the rank waits in a step, by collective; empty if unknown."""


class Report(NamedTuple):
    """How the ranks of a run compare."""

    ranks: tuple[RankReport, ...]
    """All ranks that are compared, and ended ranks for which others have waited."""
    insufficient: str
    """`insufficient data: ...` if the ranks cannot be compared, so that none can be found late."""
