"""Wording that all verdicts share: ranks, lists, durations, shares, and past verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from otel_ddp import shown
from otel_ddp.diagnosis.verdict import Labels, Verdict
from otel_ddp.vocabulary.words import GARBAGE

_MOST_RANKS = 8
_PHASES_IN_WORDS = {
    "compute": "forward, backward and the optimizer",
    "mixed": "several phases",
    "other": "the time between the phases",
    GARBAGE: "garbage collection",
}


# Advice in verdicts of kind `silence` and `stall`.
UNHEARD = "Look whether the node is still there: its power, its kernel, the network to it."
# Advice in verdicts of kind `bound` and `recurring`.
COLLECT_TOGETHER = (
    "Call gc.freeze() once all objects are built: later collections skip them. Or call "
    "gc.disable(), and gc.collect() in the same steps on all ranks."
)


def phase_in_words(phase: str) -> str:
    """The phase in which a rank loses time, for a sentence."""
    return _PHASES_IN_WORDS.get(phase, phase)


def in_phase(phase: str) -> str:
    """`in data`; in unmeasured steps, whose phase is unknown, `in a step`."""
    return "in a step" if phase == "unmeasured" else f"in {phase}"


def rank_number(labels: Labels) -> str:
    """The value of the `rank` label; `?` if there is none."""
    return dict(labels).get("rank", "?")


def rank_order(labels: Labels) -> tuple[bool, int, str]:
    """Sort key: by rank number; processes without a rank come last."""
    rank = dict(labels).get("rank", "")
    return not rank.isdecimal(), int(rank) if rank.isdecimal() else 0, rank


def rank_name(labels: Labels) -> str:
    """`rank 3 (node-1)`; `process 4711 (node-1)` without a rank."""
    return f"{_process(rank_number(labels))} ({dict(labels).get('node', '?')})"


def unit_name(labels: Labels) -> str:
    """The name of a rank, as `rank 3 (node-1)`, or of a node, as `node-1`."""
    return rank_name(labels) if "rank" in dict(labels) else dict(labels).get("node", "?")


def _process(rank: str) -> str:
    # A process without a rank has `p` and its process id as `rank` label.
    return f"process {rank[1:]}" if rank.startswith("p") else f"rank {rank}"


def rank_list(several: Iterable[Labels]) -> str:
    """`rank 3`, or `ranks 3, 5`, with at most _MOST_RANKS numbers."""
    numbers = [rank_number(each) for each in sorted(several, key=rank_order)]
    if len(numbers) == 1:
        return _process(numbers[0])
    return f"ranks {first_of(numbers, _MOST_RANKS)}"


def rank_numbers(several: Iterable[Labels]) -> str:
    """All rank numbers, sorted: `3, 5`."""
    return ", ".join(rank_number(each) for each in sorted(several, key=rank_order))


def plural(several: Sized) -> str:
    """`s` unless there is exactly one."""
    return "s" * (len(several) != 1)


def verb(several: Sized, one: str, many: str) -> str:
    """The singular or plural form of a verb."""
    return one if len(several) == 1 else many


def first_of(words: Sequence[str], most: int) -> str:
    """The first *most* words, separated by commas, and `...` if there are more."""
    return ", ".join([*words[:most], *["..."] * (len(words) > most)])


def capitalized(text: str) -> str:
    """The text with a capital first letter; `str.capitalize` lowers the rest."""
    return text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """A length of time with its unit: `20.1 ms`."""
    return shown.seconds(seconds)


def cost(others: int, lost_per_s: float) -> str:
    """The clause on how much time a late rank costs the others."""
    lose = "the other ranks together lose" if others > 1 else "the other rank loses"
    return f"{lose} {lost_per_s:.{'0f' if lost_per_s >= 10 else '2g'}} s each second"


def percent(share: float) -> str:
    """A share between 0 and 1 as text: `32 %`."""
    return shown.share(round(share, 2))


def rounded(values: Mapping[str, Any]) -> dict[str, float]:
    """The values rounded for evidence: further digits are noise."""
    return {word: round(value, 4) for word, value in values.items()}


def past_sentence(verdict: Verdict) -> str:
    """The sentence of a closed verdict. It has no date: the caller shows the date beside it."""
    evidence = verdict.evidence
    where = phase_in_words(verdict.phase)
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
    they = "its ranks were" if "ranks" in evidence else "it was"
    return (
        f"{unit_name(verdict.labels)} kept the others waiting{unequal}: {they} late in "
        f"{where}, by {share} of a step of {step}, which cost "
        f"the others {duration(evidence['lost_s'])} in total"
    )
