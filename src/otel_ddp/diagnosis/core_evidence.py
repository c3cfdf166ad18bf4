"""Says whether the core of a late rank is taken, and advises ranks that have no device."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.diagnosis.wording import duration

Cores = Mapping[Labels, float]
"""By rank: seconds for which it was ready to run and had no core, in each second."""

# A core is taken where the rank waits for it so much longer than the others that this explains so
# much of its excess.
_EXPLAINS = 0.5
_ADVICE = {
    "compute": "Look at this rank's cores: what else runs on them, how it is bound to them, their "
    "clocks.",
    "mixed": "Look at what else runs on this rank's cores.",
}


def core_hint(
    labels: Labels, phase: str, evidence: Mapping[str, Any], cores: Cores, has_device: bool
) -> tuple[str, Mapping[str, Any]]:
    """Advice, if cores are what to look at, and more evidence. *evidence*: that of the verdict."""
    usual_advice = "" if has_device else _ADVICE.get(phase, "")
    run = run_labels(labels)
    others = [each for rank, each in cores.items() if rank != labels and run_labels(rank) == run]
    if labels not in cores or not others:
        return usual_advice, {}
    step_s = evidence["step_s"]
    mine_s, others_s = cores[labels] * step_s, median(others) * step_s
    if mine_s - others_s < _EXPLAINS * evidence["excess_s"]:
        return usual_advice, {}
    more = {"waited_for_core_s": round(mine_s, 6), "others_waited_for_core_s": round(others_s, 6)}
    return (
        f"Its core is taken: in each step it is ready to run and has no core for "
        f"{duration(mine_s)}, the others for {duration(others_s)}. Look at what else runs on its "
        "cores, and how ranks are bound to them."
    ), more
