"""Adds hardware causes to a verdict on a late rank or node: busy cores, slow GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from otel_ddp.diagnosis.say import duration
from otel_ddp.diagnosis.straggler.finding import sentence_of
from otel_ddp.diagnosis.verdict import Labels, Verdict, run_labels

Cores = Mapping[Labels, float]
"""By rank: the share of the time in which its training thread was runnable but had no core."""

# Waiting for a core is the cause if it explains at least this share of the rank's lateness.
_EXPLAINS = 0.5


def with_cores(verdict: Verdict, cores: Cores) -> Verdict:
    """The verdict on a rank; with advice on cores, if waiting for a core explains its lateness."""
    evidence, mine, run = verdict.evidence, verdict.labels, run_labels(verdict.labels)
    others = [
        each for labels, each in cores.items() if run_labels(labels) == run and labels != mine
    ]
    # `cores` has only the ranks of this agent's own node. Without the late rank and another rank to
    # compare it with, say nothing about cores.
    if mine not in cores or not others:
        return verdict
    step_s = evidence["step_s"]
    mine_s, others_s = cores[mine] * step_s, median(others) * step_s
    if mine_s - others_s < _EXPLAINS * evidence["excess_s"]:
        return verdict
    more = {
        "waited_for_core_s": round(mine_s, 6),
        "others_waited_for_core_s": round(others_s, 6),
    }
    advice = (
        f"Its core is taken: in each step it is ready to run and has no core for "
        f"{duration(mine_s)}, the others for {duration(others_s)}. Look at what else runs there."
    )
    return verdict._replace(sentence=sentence_of(verdict, advice), evidence={**evidence, **more})


Gpu = Mapping[str, Any]
"""One GPU, as the agent publishes it: `index`, `name`, `labels`, `throttled`, and measurements."""

# A GPU is slow if its clock is below this share of the others' median.
_SLOWER = 0.95
_NUMBERS = ("busy_ratio", "used_bytes", "power_w", "temperature_c", "core_clock_hz")
# Lateness in these phases is not caused by a slow GPU, so no GPU is blamed for it.
_NOT_ON_GPU = ("data", "checkpoint")


def with_gpus(verdict: Verdict, gpus: Sequence[Gpu]) -> Verdict:
    """The verdict, with the state of the GPUs of the late rank or node."""
    late = dict(verdict.labels)
    is_rank = "rank" in late
    of_run = [
        each
        for each in gpus
        if "rank" in each["labels"] and each["labels"].get("run") == late.get("run")
    ]
    mine = [each for each in of_run if late.items() <= each["labels"].items()]
    if not mine or (is_rank and len(mine) > 1):
        return verdict
    others = [each for each in of_run if each not in mine]
    evidence: dict[str, Any] = {
        name: median([each[name] for each in mine if name in each])
        for name in _NUMBERS
        if any(name in each for each in mine)
    }
    if any("throttled" in each for each in mine):
        times = Counter(reason for each in mine for reason in each.get("throttled", ()))
        evidence["throttled"] = list(times) if is_rank else dict(sorted(times.items()))
    whose = "Most of its GPUs"
    if is_rank:
        evidence["index"] = mine[0].get("index")
        whose = f"Its GPU {evidence['index']}"
    causes, sentence = [*_held_back(mine, others), *_slow(mine, others)], verdict.sentence
    if causes and verdict.phase not in _NOT_ON_GPU:
        sentence += f" {whose} {' and '.join(causes)}."
    found = {"gpu" if is_rank else "gpus": evidence}
    return verdict._replace(sentence=sentence, evidence={**verdict.evidence, **found})


def _held_back(gpus: Sequence[Gpu], others: Sequence[Gpu]) -> list[str]:
    """The reasons for which most of these GPUs are throttled."""
    # A reason (such as a power cap) that also throttles most other GPUs makes no rank later than
    # the others, so it is left out.
    own, usual = (
        Counter(reason for each in some for reason in each.get("throttled", ()))
        for some in (gpus, others)
    )
    reasons = [
        reason
        for reason, times in own.items()
        if 2 * times > len(gpus) and (not others or 2 * usual[reason] < len(others))
    ]
    be = "is" if len(gpus) == 1 else "are"
    return [f"{be} held back ({', '.join(reasons)})"] if reasons else []


def _slow(gpus: Sequence[Gpu], others: Sequence[Gpu]) -> list[str]:
    own = [each["core_clock_hz"] for each in gpus if each.get("core_clock_hz")]
    clocks = [each["core_clock_hz"] for each in others if each.get("core_clock_hz")]
    if not own or not clocks or median(own) >= _SLOWER * median(clocks):
        return []
    run = "runs" if len(gpus) == 1 else "run"
    return [
        f"{run} at {median(own) / 1e6:.0f} MHz, those of the others at {median(clocks) / 1e6:.0f}"
    ]
