"""Turns the processes of one incident into its verdict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from otel_ddp.diagnosis.death import wording
from otel_ddp.diagnosis.death.ended_process import (
    REQUESTS,
    EndedProcess,
    cause_word,
    manner,
    rank_key,
)
from otel_ddp.diagnosis.death.origin import (
    Order,
    first_ended,
    guilt,
    was_intended,
    without_numbers,
)
from otel_ddp.diagnosis.verdict import Labels, Verdict, run_labels

# torchrun looks every 0.1 to 5 s, asks the others to end, and kills them 30 s later.
FOLLOWS_S = 40.0


class Surroundings(NamedTuple):
    """What else is known of the run on this node."""

    finished: Sequence[EndedProcess]
    at_work: Collection[Labels] | None
    """The ranks that still train together; None: not known."""
    stall: str = ""
    """For how long no rank had moved before, and why; empty where ranks moved."""
    under_nccl: bool = False
    """Whether a watchdog ends ranks that stand for long."""


def verdict_of(members: list[EndedProcess], around: Surroundings) -> Verdict | None:
    """The verdict on processes that ended together; None where the end is no failure."""
    # Code 0 without a word: a program that leaves with os._exit when its work is done.
    left = [each for each in members if each.state != "failed" and each.cause.get("exit_code") == 0]
    members = [each for each in members if each not in left]
    around = around._replace(finished=[*around.finished, *left])
    members.sort(key=lambda each: (each.ended_ns, rank_key(each.labels)))
    if not members or was_intended(members):
        return None
    first, order = first_ended(members)
    if not any(map(guilt, first)) and "lost_peer" in map(manner, first):
        # Some lost a peer and a launcher ended the others: the cause is not among them.
        return _lost_peers(members, around)
    if order == "unknown":
        return _together(first, members, around)
    (origin,) = first
    others = [each for each in members if each is not origin]
    why = f"{wording.short_cause(origin)}{wording.hints(origin)}"
    sentence = f"{wording.name_and_node(origin.labels)} {wording.how_it_ended(origin)}: {why}"
    if others:
        sentence += f". {wording.what_followed(origin, others)}"
    sentence += _after_stall(first, around)
    return Verdict(
        "death",
        origin.labels,
        origin.phase,
        f"{sentence}.",
        _evidence(origin, order, members),
        origin.step,
        origin.ended_ns,
    )


def _after_stall(first: list[EndedProcess], around: Surroundings) -> str:
    """That no rank had moved before; and that a watchdog has ended them, where all shows that."""
    if not around.stall:
        return ""
    gave_up = around.under_nccl and {each.cause.get("signal") for each in first} == {"SIGABRT"}
    return f"{wording.WATCHDOG if gave_up else ''}. Before that, no rank had moved {around.stall}"


def _together(
    first: list[EndedProcess], members: list[EndedProcess], around: Surroundings
) -> Verdict:
    """It is not known which process was first, so the verdict is about the run."""
    reported = all(each.state != "killed" for each in first)
    when = (
        f"failed within {wording.within(first)} of each other"
        if reported
        else f"ended at the same moment (within {wording.within(first)})"
    )
    sentence = (
        f"{wording.names(each.labels for each in first)} {when}, {wording.where(first)}: "
        "it is not known which was first"
    )
    causes = {wording.cause(each, sizes=False) for each in first}
    if len(causes) == 1:
        sentence += f"; each: {wording.short(causes.pop())}"
    elif reported:
        sentence += f"; {wording.each_cause(first)}"
    if {each.cause.get("signal") for each in first} <= set(REQUESTS):
        sentence += ". A launcher, a scheduler or a person asked all of them to end"
    rest = [each for each in members if each not in first]
    if rest:
        sentence += f". {wording.what_followed(first[0], rest)}"
    sentence += _after_stall(first, around)
    words = {cause_word(each) for each in first}
    cause = words.pop() if reported and len(words) == 1 else "unknown"
    return _about_the_run(f"{sentence}.", first, members, cause)


def _lost_peers(members: list[EndedProcess], around: Surroundings) -> Verdict:
    """They lost connections, and no process that ended here says why the other end did."""
    lost = [each for each in members if manner(each) == "lost_peer"]
    if len(lost) == 1:
        name = wording.name_and_node(lost[0].labels)
        sentence = f"{name} {wording.how_it_ended(lost[0])}, because it lost a connection"
    else:
        names = wording.names(each.labels for each in lost)
        when = f"within {wording.within(lost)}, {wording.where(lost)}"
        sentence = f"{names} failed {when}, because they lost connections"
    if len(set(map(without_numbers, lost))) == 1:
        sentence += f": {wording.short(lost[0].reason)}"
    else:
        sentence += f": {wording.each_cause(lost)}"
    sentence += f". {_other_end(lost, members, around)}"
    if rest := [each for each in members if each not in lost]:
        sentence += f". {wording.what_followed(lost[0], rest)}"
    sentence += _after_stall(lost, around)
    return _about_the_run(f"{sentence}.", lost, members, "lost_peer")


def _other_end(lost: list[EndedProcess], members: list[EndedProcess], around: Surroundings) -> str:
    """Where the peer may be that they lost, as far as that is known."""
    soonest, latest = min(e.ended_ns for e in lost), max(e.ended_ns for e in lost)
    world = max((each.world_size or 0 for each in lost), default=0)
    # Not an evaluator that ended as well: it has a world of its own.
    finished = [each for each in around.finished if each.world_size in (None, world)]
    left = [
        each
        for each in finished
        if soonest - FOLLOWS_S * 1e9 <= each.ended_ns and each.seen_alive_ns <= latest
    ]
    if left:
        verb = "has" if len(left) == 1 else "have"
        text = f"{wording.names(e.labels for e in left)} {verb} finished before that"
        if any("exit_code" not in e.cause for e in left):
            text += ", with an exit code that is not known"
        return wording.capitalized(text)
    at_work = around.at_work or ()
    ended = [each.labels for each in (*members, *finished)]
    if not 0 < world <= len({*at_work, *ended}):
        if around.at_work is not None and not at_work and world:
            return "No rank here reports another cause: it is on another node, or in the network"
        return "The other end may be on another node: look there"
    if at_work:
        verb = "is" if len(at_work) == 1 else "are"
        return f"The run is on this node alone, and {wording.names(at_work)} {verb} still there"
    return "The run is on this node alone, and no rank reports another cause"


def _about_the_run(
    sentence: str, first: list[EndedProcess], members: list[EndedProcess], cause: str
) -> Verdict:
    phases = {each.phase for each in first}
    return Verdict(
        "death",
        run_labels(first[0].labels),
        phases.pop() if len(phases) == 1 else "mixed",
        sentence,
        {**_evidence(None, "unknown", members), "cause": cause},
        max((each.step for each in first if each.step is not None), default=None),
        min(each.ended_ns for each in first),
    )


def _evidence(
    origin: EndedProcess | None, order: Order, members: list[EndedProcess]
) -> dict[str, Any]:
    start_ns = members[0].ended_ns if origin is None else origin.ended_ns
    return {
        "cause": "unknown" if origin is None else cause_word(origin),
        "order_known_by": order,
        "ended": [
            {
                **{name: dict(each.labels).get(name, "") for name in ("rank", "node")},
                "state": each.state,
                "step": each.step,
                "phase": each.phase,
                "seconds_after": round((each.ended_ns - start_ns) / 1e9, 3),
                "reason": each.reason,
                **each.cause,
            }
            for each in members
        ],
    }
