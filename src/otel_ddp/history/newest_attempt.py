"""Finds the processes of a run's newest attempt, and its state.

A restarted run may have fewer ranks and other nodes than its earlier attempts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp import plain
from otel_ddp.vocabulary.words import ENDED_STATES, NOT_HEARD

# If an agent is killed, the state in its history stays "running". So a run whose history has not
# been written for this time counts as silent.
_SILENT_S = 60.0
# The state of several processes is the first of these states that any of the processes has.
_STATES = ("running", "starting", "killed", "failed", "finished")
# _SAME_NS: tolerance between the clocks of two nodes. _NEVER_NS: a time later than any real one.
_SAME_NS, _NEVER_NS = 60 * 10**9, 2**63
# A longer text is no number of a rank. Python would refuse to parse thousands of digits.
_LONGEST_RANK = 20

Rank = Mapping[str, Any]
"""A process, as `otel-ddp status --json` describes it."""


class OfNode(NamedTuple):
    """The state of a run in the history of one node's agent."""

    ranks: Mapping[str, Rank]
    seen_ns: int
    began_ns: int = 0
    """The start of the newest attempt; 0 if there is only one."""
    node: str = ""
    run_began_ns: int = 0
    led_by: str = ""
    """The lead's node, if it is another node; else empty."""
    others: Mapping[str, int] = {}
    """The other nodes whose ranks this history includes, and since when it includes each node."""


class Newest(NamedTuple):
    """The newest attempt of a run."""

    ranks: dict[str, Rank]
    state: str
    """`running` if a rank still runs, else the worst state in which a rank ended."""
    began_ns: int
    """The start of the attempt; 0 if it is the first."""


def of_node(about: Mapping[str, Any], ranks: Mapping[str, Rank]) -> OfNode:
    """The state from the tables `about` and `ranks` of a history."""
    _, *later = plain.list_of(dict, about.get("attempts")) or [{}]
    began_ns = plain.whole(later[-1].get("began_ns")) if later else 0
    seen_ns, run_began_ns = (plain.whole(about.get(key)) or 0 for key in ("seen_ns", "began_ns"))
    others = plain.mapping(about.get("nodes")).items()
    return OfNode(
        ranks,
        seen_ns,
        began_ns=began_ns or 0,
        node=plain.text(about.get("node")),
        run_began_ns=run_began_ns,
        led_by=plain.text(about.get("led_by")),
        others={node: ns for node, since in others if (ns := plain.whole(since)) is not None},
    )


def are_redundant(nodes: Sequence[OfNode]) -> list[bool]:
    """For each history, whether the lead's history in the same folder has its data too.

    The lead's history includes the ranks of all nodes that are connected to the lead. A history
    with ranks of other nodes is never redundant.
    """
    since: dict[str, list[int]] = {}
    for each in nodes:
        for node, since_ns in each.others.items():
            since.setdefault(node, []).append(since_ns)
    seen_ns = {each.node: each.seen_ns for each in nodes}
    return [
        not each.others
        and seen_ns.get(each.led_by, -_NEVER_NS) >= each.seen_ns - _SAME_NS
        and min(since.get(each.node, ()), default=_NEVER_NS) <= each.run_began_ns + _SAME_NS
        for each in nodes
    ]


def newest_attempt(nodes: Sequence[OfNode]) -> Newest:
    """The newest attempt over all nodes.

    If two histories describe a process, the history that knew its state last counts.
    """
    began_ns = max((each.began_ns for each in nodes), default=0)
    found: dict[str, tuple[Rank, int]] = {}
    for node in nodes:
        for rank, each in node.ranks.items():
            before, before_seen_ns = found.get(rank, ({}, 0))
            started_ns, is_same = _started_ns(each), _are_one(each, before)
            seen_ns = _seen_ns(each, node.seen_ns)
            if before and not is_same:
                # The rank has moved to another node, so this is a newer attempt.
                began_ns = max(began_ns, started_ns, _started_ns(before))
            if seen_ns >= before_seen_ns if is_same else started_ns >= _started_ns(before):
                found[rank] = each, seen_ns
    began_ns = max(began_ns, _trained_again_ns([each for each, _ in found.values()]))
    of_it = {
        rank: (each, seen_ns)
        for rank, (each, seen_ns) in found.items()
        if each.get("state") not in ENDED_STATES or _ended_ns(each) >= began_ns
    }
    ranks = {rank: of_it[rank][0] for rank in sorted(of_it, key=rank_order)}
    state = _state([*of_it.values()])
    return Newest(ranks, state, began_ns)


def _trained_again_ns(ranks: Iterable[Rank]) -> int:
    """The start of the latest attempt, to judge by its ranks; 0 if there was only one.

    An attempt starts with a rank that began after all ranks before it had ended.
    """
    again_ns = last_end_ns = 0
    for each in sorted(ranks, key=_started_ns):
        started_ns = _started_ns(each)
        if 0 < last_end_ns < started_ns and each.get("trains"):
            again_ns = started_ns
        has_ended = each.get("state") in ENDED_STATES
        last_end_ns = max(last_end_ns, _ended_ns(each) if has_ended else _NEVER_NS)
    return again_ns


def first_rank(newest: Newest, node: OfNode) -> tuple[bool, int, str]:
    """Sort key: nodes by their first rank; nodes without ranks come last."""
    own = (rank for rank, each in node.ranks.items() if newest.ranks.get(rank) is each)
    return min(map(rank_order, own), default=(True, 0, ""))


def _started_ns(rank: Rank) -> int:
    return plain.whole(rank.get("started_ns")) or 0


def _are_one(one: Rank, other: Rank) -> bool:
    """Whether both describe the same process.

    Two histories may have different start times of one process, because agents measure the offsets
    of their clocks repeatedly. So the same journal on the same node is enough.
    """
    names = [(each.get("node"), each.get("journal")) for each in (one, other)]
    return _started_ns(one) == _started_ns(other) or (bool(names[0][1]) and names[0] == names[1])


def _seen_ns(rank: Rank, seen_ns: int) -> int:
    """When the state was last known: on a silent node, when the process was last seen alive."""
    return (
        plain.whole(rank.get("seen_alive_ns")) or 0 if rank.get("state") == NOT_HEARD else seen_ns
    )


def _ended_ns(rank: Rank) -> int:
    """When the process was last seen alive, or its start if that is later."""
    return max(plain.whole(rank.get("seen_alive_ns")) or 0, _started_ns(rank))


def _state(ranks: Sequence[tuple[Rank, int]]) -> str:
    """The state of several processes, each with the time at which it was last known.

    The processes of a vanished node stay "running" in its history, so they are ignored if another
    process was seen more than _SILENT_S later. A process on a silent node counts as running.
    """
    latest_ns = max((seen_ns for _, seen_ns in ranks), default=0)
    states = [(str(each.get("state")), seen_ns) for each, seen_ns in ranks]
    return worst_state(
        "running" if state == NOT_HEARD else state
        for state, seen_ns in states
        if state in ENDED_STATES or latest_ns - seen_ns <= _SILENT_S * 1e9
    )


def worst_state(states: Iterable[str]) -> str:
    """The state of several processes together: `running`, or the worst ended state."""
    return min(
        states, key=lambda each: _STATES.index(each) if each in _STATES else 0, default="starting"
    )


def is_silent(state: str, seen_ns: int) -> bool:
    """Whether a run has not ended, but was last seen long ago."""
    return state in ("running", "starting") and time.time_ns() - seen_ns > _SILENT_S * 1e9


def rank_order(rank: str) -> tuple[bool, int, str]:
    """Sort key: numbers by value, then other texts."""
    is_number = rank.isdecimal() and len(rank) < _LONGEST_RANK
    return (not is_number, int(rank) if is_number else 0, rank)
