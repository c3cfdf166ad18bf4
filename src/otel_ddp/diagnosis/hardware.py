"""What a rank's GPU has to do with its being late: slower, or held back, where others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from otel_ddp.diagnosis.verdict import Verdict, Who

Gpu = Mapping[str, Any]
"""As the agent's file has it: `index`, `name`, `labels`, `throttled`, and numbers by name."""

_SLOWER = 0.95
_NUMBERS = ("busy_ratio", "used_bytes", "power_w", "temperature_c", "sm_clock_hz")
# In these a rank waits for other things than its GPU.
_ELSEWHERE = ("data", "checkpoint")


def with_gpu(verdict: Verdict, gpus: Sequence[Gpu]) -> Verdict:
    """The same finding about a rank, with what its GPU adds to that, if it has one."""
    # A board of which the rank uses a part has its labels as well.
    whole = {each.get("parent") for each in gpus}
    gpus = [each for each in gpus if each.get("uuid") is None or each["uuid"] not in whole]
    mine = [each for each in gpus if _labels(each) == dict(verdict.who)]
    if len(mine) != 1:
        return verdict
    (gpu,) = mine
    others = [each for each in gpus if each is not gpu and _beside(each, verdict.who)]
    found = {name: gpu[name] for name in _NUMBERS if name in gpu}
    evidence = {**found, "index": gpu.get("index"), "throttled": list(_throttled(gpu))}
    said = [] if verdict.phase in _ELSEWHERE else [*_held_back(gpu, others), *_slow(gpu, others)]
    sentence = verdict.sentence
    if said:
        sentence += f" Its GPU {gpu.get('index')} {' and '.join(said)}."
    return verdict._replace(sentence=sentence, evidence={**verdict.evidence, "gpu": evidence})


def _held_back(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    # What holds all of them back, a cap on their power say, makes no difference between them.
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


def _beside(gpu: Gpu, who: Who) -> bool:
    """Whether a rank of the same run uses this one."""
    labels = _labels(gpu)
    return "rank" in labels and labels.get("run") == dict(who).get("run")
