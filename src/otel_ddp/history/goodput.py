"""Goodput: reads from histories how much time all ranks of a run spent on each cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from otel_ddp import plain, shown
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import TIME_CAUSES

_MOST_SHOWN, _FEWEST_SHOWN = 3, 0.005


def goodput_of(run: WholeRun) -> dict[str, Any] | None:
    """The goodput of a run, in seconds summed over all ranks. docs/json.md describes each key.

    None if the histories have no times: the run made no step, or an earlier version recorded it.
    """
    of_nodes: dict[str, Mapping[str, Any]] = {}
    attempts: Sequence[Mapping[str, Any]] = ()
    for history in run.histories:
        time = plain.mapping(history.about.get("time"))
        own = {str(history.about.get("node")): time}
        for node, counted in {**plain.mapping(time.get("nodes")), **own}.items():
            # Two histories may have the times of this node: that of its own agent, and that of the
            # lead, i.e. the agent that judges the run. Use the larger times: they are more
            # complete.
            of_nodes[node] = max(of_nodes.get(node, {}), plain.mapping(counted), key=_total_s)
        # The first history is from rank 0's node, so its list of attempts is preferred.
        attempts = attempts or plain.list_of(dict, history.about.get("attempts"))
    seconds, late = (_summed(of_nodes.values(), key) for key in ("seconds", "late"))
    if not seconds:
        return None
    total_s = sum(seconds.values())
    return {
        "rank_s": round(total_s, 3),
        "share": round(seconds.get("productive", 0.0) / (total_s or 1.0), 6),
        "seconds": {each: round(seconds[each], 3) for each in TIME_CAUSES if each in seconds},
        "late": {each: round(s, 3) for each, s in late.items()},
        "attempts": [*map(_plain, attempts, [{}, *attempts])],
    }


def _total_s(counted: Mapping[str, Any]) -> float:
    return sum(float(s) for s in plain.mapping(counted.get("seconds")).values())


def _summed(of_nodes: Iterable[Mapping[str, Any]], key: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for counted in of_nodes:
        for each, s in plain.mapping(counted.get(key)).items():
            found[each] = found.get(each, 0.0) + float(s)
    return found


def _plain(attempt: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The public fields of an attempt. Other fields are only for an agent that resumes the history.

    *before*: the previous attempt.
    """
    keys = ("attempt", "began_ns", "ended_ns", "state", "why", "first_step", "last_step")
    found = {key: attempt[key] for key in keys if key in attempt}
    if "ended_ns" in before and "new_ns" in attempt:
        found["back_s"] = round((attempt["new_ns"] - before["ended_ns"]) / 1e9, 3)
    return {**found, "repeated_steps": plain.whole(attempt.get("repeated_steps")) or 0}


def in_words(counted: Mapping[str, Any]) -> str:
    """One line for a card: goodput, and the largest losses. *counted*: from `goodput_of`."""
    total_s, many = counted["rank_s"], len(counted["attempts"])
    shares = {each: s / total_s for each, s in counted["seconds"].items() if each != "productive"}
    most = sorted(shares, key=lambda each: -shares[each])[:_MOST_SHOWN]
    lost = [
        f"{e.replace('_', ' ')} {shown.share(shares[e])}"
        for e in most
        if shares[e] >= _FEWEST_SHOWN
    ]
    of = f"of {shown.seconds(total_s)} of all ranks" + (f" in {many} attempts" if many > 1 else "")
    return ", ".join([f"{shown.share(counted['share'])} {of}", *lost])
