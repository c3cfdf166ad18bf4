"""Adds what its node knows to a verdict on a late rank: a core that is taken, a slow GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.say import duration
from otel_ddp.diagnosis.verdict import Labels, Verdict, run_labels

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
    rank: RankState, phase: str, evidence: Mapping[str, Any], cores: Cores
) -> tuple[str, Mapping[str, Any]]:
    """Advice, if cores are what to look at, and more evidence. *evidence*: that of the verdict."""
    labels, run = rank.labels, run_labels(rank.labels)
    usual_advice = _ADVICE.get(phase, "") if rank.device_clock is None else ""
    others = [each for one, each in cores.items() if one != labels and run_labels(one) == run]
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


Gpu = Mapping[str, Any]
"""One GPU as in the agent's file: `index`, `name`, `labels`, `throttled`, numbers by name."""

_SLOWER = 0.95
_NUMBERS = ("busy_ratio", "used_bytes", "power_w", "temperature_c", "sm_clock_hz")
# In these phases a rank waits for other things than its GPU.
_NOT_ON_GPU = ("data", "checkpoint")


def with_gpu(verdict: Verdict, gpus: Sequence[Gpu]) -> Verdict:
    """The same verdict with what the rank's GPU adds to it, if the rank has one of its own."""
    # A board of which the rank uses a part has the rank's labels as well.
    whole = {each.get("parent") for each in gpus}
    gpus = [each for each in gpus if each.get("uuid") is None or each["uuid"] not in whole]
    mine = [each for each in gpus if _labels(each) == dict(verdict.labels)]
    if len(mine) != 1:
        return verdict
    (gpu,) = mine
    others = [each for each in gpus if each is not gpu and _is_of_run(each, verdict.labels)]
    found = {name: gpu[name] for name in _NUMBERS if name in gpu}
    evidence = {**found, "index": gpu.get("index"), "throttled": list(_throttled(gpu))}
    causes = [] if verdict.phase in _NOT_ON_GPU else [*_held_back(gpu, others), *_slow(gpu, others)]
    sentence = verdict.sentence
    if causes:
        sentence += f" Its GPU {gpu.get('index')} {' and '.join(causes)}."
    return verdict._replace(sentence=sentence, evidence={**verdict.evidence, "gpu": evidence})


def _held_back(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    # What holds all GPUs back, such as a power cap, makes no difference between them.
    reasons = [
        reason
        for reason in _throttled(gpu)
        if not others or sum(reason in _throttled(each) for each in others) * 2 < len(others)
    ]
    return [f"is held back ({', '.join(reasons)})"] if reasons else []


def _slow(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    clock = gpu.get("sm_clock_hz")
    clocks = [each["sm_clock_hz"] for each in others if each.get("sm_clock_hz")]
    if not clock or not clocks or clock >= _SLOWER * median(clocks):
        return []
    return [f"runs at {clock / 1e6:.0f} MHz, those of the others at {median(clocks) / 1e6:.0f}"]


def _labels(gpu: Gpu) -> Mapping[str, str]:
    labels = gpu.get("labels")
    return labels if isinstance(labels, Mapping) else {}


def _throttled(gpu: Gpu) -> Sequence[str]:
    reasons = gpu.get("throttled")
    return reasons if isinstance(reasons, Sequence) else ()


def _is_of_run(gpu: Gpu, rank: Labels) -> bool:
    """Whether a rank of the same run uses this GPU."""
    labels = _labels(gpu)
    return "rank" in labels and labels.get("run") == dict(rank).get("run")
