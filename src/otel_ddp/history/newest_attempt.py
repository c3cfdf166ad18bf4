"""Decides which processes are the newest attempt of a run, and what state it is in.

A run that is started again may have fewer ranks, and other nodes: what an earlier attempt has left
is no part of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp import plain
from otel_ddp.vocabulary.words import ENDED_STATES, NOT_HEARD

# A history whose agent was killed says "running" for ever.
_SILENT_S = 60.0
# What goes on before what has ended, and of that the worst first.
_STATES = ("running", "starting", "killed", "failed", "finished")
# The clocks of two nodes, and two looks at one process.
_SAME_NS, _NEVER_NS = 60 * 10**9, 2**63
# In digits: Python refuses to read numbers of thousands.
_LONGEST_RANK = 20

Rank = Mapping[str, Any]
"""A process, as `otel-ddp status --json` describes it."""


class OfNode(NamedTuple):
    """What the agent of one node says of a run."""

    ranks: Mapping[str, Rank]
    """Of each rank the newest process that it knows."""
    seen_ns: int
    """When it was written of last."""
    began_ns: int = 0
    """When its newest attempt began; 0 where it knows of one alone."""
    node: str = ""
    run_began_ns: int = 0
    led_by: str = ""
    """The node whose agent has the ranks of all nodes, if that is another one."""
    others: Mapping[str, int] = {}
    """Of the other nodes whose ranks it has: since when."""


class Newest(NamedTuple):
    """The newest attempt of a run."""

    ranks: dict[str, Rank]
    state: str
    """`running`, or the worst end of its ranks: `finished`, `failed`, `killed`."""
    began_ns: int
    """0 where no earlier one is known."""


def of_node(about: Mapping[str, Any], ranks: Mapping[str, Rank]) -> OfNode:
    """What the history of one node has in its table `about`."""
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


def are_told_by_others(nodes: Sequence[OfNode]) -> list[bool]:
    """Of each, whether the others have all that it has: nodes may write into one folder.

    A lead has all ranks, from when its link was there until it is gone. A node that led once has
    ranks of others.
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
    """Of all nodes; where two know one process, the later of them describes it."""
    began_ns = max((each.began_ns for each in nodes), default=0)
    found: dict[str, tuple[Rank, int]] = {}
    for node in nodes:
        for rank, each in node.ranks.items():
            before, before_seen_ns = found.get(rank, ({}, 0))
            started_ns, is_same = _started_ns(each), _are_one(each, before)
            seen_ns = _seen_ns(each, node.seen_ns)
            if before and not is_same:
                # Another node has taken it over.
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
    state = _state((_state_of(each), seen_ns) for each, seen_ns in of_it.values())
    return Newest(ranks, state, began_ns)


def _trained_again_ns(ranks: Iterable[Rank]) -> int:
    """When the last rank started that trained after all before it had ended; 0: none did."""
    again_ns = last_end_ns = 0
    for each in sorted(ranks, key=_started_ns):
        started_ns = _started_ns(each)
        if 0 < last_end_ns < started_ns and each.get("trains"):
            again_ns = started_ns
        has_ended = each.get("state") in ENDED_STATES
        last_end_ns = max(last_end_ns, _ended_ns(each) if has_ended else _NEVER_NS)
    return again_ns


def first_rank(newest: Newest, node: OfNode) -> tuple[bool, int, str]:
    """Sorts nodes by the first rank that they have of it; those without one come last."""
    own = (rank for rank, each in node.ranks.items() if newest.ranks.get(rank) is each)
    return min(map(rank_order, own), default=(True, 0, ""))


def _started_ns(rank: Rank) -> int:
    return plain.whole(rank.get("started_ns")) or 0


def _are_one(one: Rank, other: Rank) -> bool:
    """Whether both are one process. The clock of another node is measured again and again."""
    names = [(each.get("node"), each.get("journal")) for each in (one, other)]
    return _started_ns(one) == _started_ns(other) or (bool(names[0][1]) and names[0] == names[1])


def _state_of(rank: Rank) -> str:
    """One that is not heard was running when it was."""
    state = str(rank.get("state"))
    return "running" if state == NOT_HEARD else state


def _seen_ns(rank: Rank, seen_ns: int) -> int:
    """When it was written of last; of a process whose node is not heard, when that was heard."""
    return (
        plain.whole(rank.get("seen_alive_ns")) or 0 if rank.get("state") == NOT_HEARD else seen_ns
    )


def _ended_ns(rank: Rank) -> int:
    """When it was last seen alive; it may have started only after that."""
    return max(plain.whole(rank.get("seen_alive_ns")) or 0, _started_ns(rank))


def _state(ranks: Iterable[tuple[str, int]]) -> str:
    """Of several, by the state of each and when its node was written of last.

    A node that has vanished says "running" for ever: it does not count while others were seen.
    """
    ranks = list(ranks)
    latest_ns = max((seen_ns for _, seen_ns in ranks), default=0)
    return worst_state(
        state
        for state, seen_ns in ranks
        if state in ENDED_STATES or latest_ns - seen_ns <= _SILENT_S * 1e9
    )


def worst_state(states: Iterable[str]) -> str:
    """Of several processes: `running`, or the worst end."""
    return min(
        states, key=lambda each: _STATES.index(each) if each in _STATES else 0, default="starting"
    )


def is_silent(state: str, seen_ns: int) -> bool:
    """Whether a run that has not ended was last seen long ago."""
    return state in ("running", "starting") and time.time_ns() - seen_ns > _SILENT_S * 1e9


def rank_order(rank: str) -> tuple[bool, int, str]:
    """Numbers by their value, then what is no number."""
    is_number = rank.isdecimal() and len(rank) < _LONGEST_RANK
    return (not is_number, int(rank) if is_number else 0, rank)
