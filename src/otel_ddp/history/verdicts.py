"""Orders the verdicts of a run: the worst and the costliest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from otel_ddp import plain
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, VERDICTS, is_taken_back

Verdict = Mapping[str, Any]


def worst_first(verdicts: Iterable[Verdict], began_ns: int = 0) -> list[Verdict]:
    """Sort verdicts: open ones before past ones, harmless ones last, then by severity and cost.

    Drops past verdicts of earlier attempts. *began_ns*: the start of the newest attempt.
    """
    return sorted(
        (
            each
            for each in verdicts
            if each.get("until_ns") is None or (plain.whole(each.get("since_ns")) or 0) >= began_ns
        ),
        key=_harm,
    )


def shown_first(verdicts: Iterable[Verdict], began_ns: int) -> list[Verdict]:
    """The verdicts to show first: the worst one, and the costliest one if that is another one."""
    found = [
        each
        for each in worst_first(verdicts, began_ns)
        if each.get("kind") not in HARMLESS_VERDICTS and not is_taken_back(each.get("evidence"))
    ]
    costly = max(found, key=_lost_s, default=None)
    is_other = costly is not None and costly is not found[0] and _lost_s(costly) > 0
    return [*found[:1], costly] if costly and is_other else found[:1]


def named_ranks(verdict: Verdict) -> Sequence[str]:
    """The ranks that a verdict is about: one rank, or the ranks of a late node."""
    rank = plain.mapping(verdict.get("who")).get("rank")
    of_node = plain.mapping(verdict.get("evidence")).get("ranks")
    return [str(rank)] if rank else [*map(str, of_node)] if isinstance(of_node, list) else []


def _lost_s(verdict: Verdict) -> float:
    return plain.number(plain.mapping(verdict.get("evidence")).get("lost_s")) or 0.0


def _harm(verdict: Verdict) -> tuple[bool, bool, int, float, int]:
    kind = verdict.get("kind")
    return (
        kind in HARMLESS_VERDICTS,
        verdict.get("until_ns") is not None,
        VERDICTS.index(kind) if kind in VERDICTS else len(VERDICTS),
        -_lost_s(verdict),
        -(plain.whole(verdict.get("since_ns")) or 0),
    )
