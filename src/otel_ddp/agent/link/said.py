"""Packs what the lead says of a run for one of its nodes, and unpacks it there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from otel_ddp.agent.link.channel import MOST_BYTES, MOST_NODE_LETTERS
from otel_ddp.agent.link.known import Senseless, read_json
from otel_ddp.agent.verdicts.reports import Judgement
from otel_ddp.diagnosis.straggler.finding import RankReport, Report
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.vocabulary.words import Kind

# Tables of all ranks stay with the lead; lists of a few members travel.
_MOST_MEMBERS = 256
_MOST_VERDICTS = 100


class Said:
    """What is said of a run at one moment: to each agent what is true of all, and of its ranks."""

    def __init__(self, judgement: Judgement) -> None:
        of_all = {
            "by": judgement.by,
            "open": [_lean(each) for each in judgement.open[-_MOST_VERDICTS:]],
            "past": [_lean(each) for each in judgement.past[-_MOST_VERDICTS:]],
            "insufficient": judgement.report.insufficient,
            "compared": judgement.compared,
        }
        self._of_all = json.dumps(of_all)
        self._ranks = {each.labels: each for each in judgement.report.ranks}

    def to(self, own: Sequence[Labels]) -> bytes:
        """For the agent whose processes have these labels, whatever that agent is called."""
        ranks = [
            [each.labels, dict(each.excess), each.lost_s, each.work_s]
            for labels in own
            if (each := self._ranks.get(labels)) is not None
        ]
        # What is true of all is packed once.
        of_node = json.dumps({"ranks": ranks})
        return f"{self._of_all[:-1]}, {of_node[1:]}".encode()


def _lean(verdict: Mapping[str, Any]) -> dict[str, Any]:
    evidence = verdict["evidence"]
    few = {
        name: value
        for name, value in evidence.items()
        if not isinstance(value, (list, dict)) or len(value) <= _MOST_MEMBERS
    }
    return {**verdict, "evidence": few}


def unpack(content: bytes, run: Labels, own: Sequence[Labels], ahead_ns: int = 0) -> Judgement:
    """Parse the lead's verdicts; rows of ranks other than these are left out. Raises Senseless.

    *ahead_ns*: its clock less ours.
    """
    found = read_json(content, MOST_BYTES)
    try:
        ranks = _of_ranks(found, own)
        still, past = (
            [_turned(e, ahead_ns) for e in found[name][:_MOST_VERDICTS] if _is_verdict(e, run)]
            for name in ("open", "past")
        )
        report = Report(ranks, insufficient=str(found["insufficient"]))
        compared = int(found["compared"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Senseless("what the lead says") from None
    if not (isinstance(by := found.get("by"), str) and by.isprintable()):
        raise Senseless("the name of the lead's node")
    return Judgement(by[:MOST_NODE_LETTERS], still, past, report, compared)


def _of_ranks(found: Mapping[str, Any], own: Sequence[Labels]) -> tuple[RankReport, ...]:
    here = {*own}
    return tuple(
        RankReport(labels, _numbers(excess), float(lost_s), work_s and float(work_s))
        for row, excess, lost_s, work_s in found["ranks"]
        if (labels := _labels(row)) in here
    )


_KINDS: frozenset[Kind] = frozenset(get_args(Kind))


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {str(word): float(each) for word, each in found.items()}


def _labels(row: Any) -> Labels:
    return tuple((str(key), str(value)) for key, value in row)


def _is_verdict(each: Any, run: Labels) -> bool:
    """Whether it has what those show who read verdicts, and is about this run."""
    return (
        isinstance(each, dict)
        and each.get("kind") in _KINDS
        and isinstance(each.get("sentence"), str)
        and isinstance(each.get("phase"), str)
        and isinstance(each.get("evidence"), dict)
        and _is_whole(each.get("since_ns"))
        # The history of this node has columns for these.
        and "step" in each
        and all(each.get(name) is None or _is_whole(each[name]) for name in ("step", "until_ns"))
        and isinstance(each.get("who"), dict)
        and run_labels(tuple((str(k), str(v)) for k, v in each["who"].items())) == run
    )


def _turned(verdict: Mapping[str, Any], ahead_ns: int) -> dict[str, Any]:
    """With its times on our clock."""
    times = {name: verdict.get(name) for name in ("since_ns", "until_ns")}
    return {**verdict, **{name: ns - ahead_ns for name, ns in times.items() if ns is not None}}


def _is_whole(value: Any) -> bool:
    """Whether it is an integer of 64 bits."""
    return type(value) is int and abs(value) < 1 << 63
