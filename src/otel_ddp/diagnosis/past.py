"""Puts a verdict that is over into words: what was, and what it has cost."""

from __future__ import annotations

from otel_ddp.diagnosis.verdict import Verdict
from otel_ddp.diagnosis.wording import duration, percent, rank_name

_PLACES = {
    "compute": "forward, backward and the optimizer",
    "mixed": "several phases",
    "other": "the time between the phases",
}


def past_sentence(verdict: Verdict) -> str:
    """For people who come after it; from when to when is said beside it."""
    evidence = verdict.evidence
    where = _PLACES.get(verdict.phase, verdict.phase)
    if verdict.kind == "recurring":
        return (
            f"{rank_name(verdict.labels)} stalled in {where} about every "
            f"{evidence['recurs_every']:.0f} steps, for {duration(evidence['stall_s'])}, which "
            f"cost the others {duration(evidence['lost_s'])} in total"
        )
    if verdict.kind not in ("straggler", "imbalance"):
        return verdict.sentence
    share, step = percent(evidence["excess"]), duration(evidence["step_s"])
    unequal = ", for its larger batches" if verdict.kind == "imbalance" else ""
    return (
        f"{rank_name(verdict.labels)} kept the others waiting{unequal}: it was late in "
        f"{where}, by {share} of a step of {step}, which cost "
        f"the others {duration(evidence['lost_s'])} in total"
    )
