"""Decides which process of an incident ended first, and whether the end was intended."""

from __future__ import annotations

import re
from typing import Literal

from otel_ddp.diagnosis.death import wording
from otel_ddp.diagnosis.death.ended_process import REQUESTS, EndedProcess, manner

# An out-of-memory kill is the cause, even where giving back the memory delayed the end of it.
_KILL_TAKES_S = 2.0
# Ctrl-C reaches all ranks at once; within this, another error may come from it.
_INTERRUPT_TAKES_S = 1.0

Order = Literal["only", "time", "evidence", "unknown"]
"""What the order of the ends is known by."""


def was_intended(members: list[EndedProcess]) -> bool:
    """Whether a person, a scheduler or the program itself ended the run. *members*: by time."""
    manners = [manner(each) for each in members]
    if "killed" in manners:
        return False
    # A launcher asks the others to end once one has failed; here the request came before that.
    if next((each for each in manners if each != "lost_peer"), None) == "requested":
        return True
    # No launcher sends SIGINT by itself, so all ranks got it. One of them may have failed over it,
    # in a data loader for example, before it could report it.
    soonest_ns = members[0].ended_ns
    if any(
        each.reason.startswith("KeyboardInterrupt")
        and each.ended_ns - soonest_ns <= _INTERRUPT_TAKES_S * 1e9
        for each in members
    ):
        return True
    if set(manners) != {"exit_code"}:
        return False
    # Where all leave with a code, or no other rank is affected, the program meant it: many programs
    # leave with 1 when a scheduler asks them to. A single one that reported "failed" has failed.
    return len(members) > 1 or members[0].state == "finished" or members[0].world_size == 1


def first_ended(members: list[EndedProcess]) -> tuple[list[EndedProcess], Order]:
    """Which process ended first, and what says so; several where nothing does."""
    if len(members) == 1:
        return members, "only"
    soonest = min(each.ended_ns for each in members)
    out_of_memory = [
        each
        for each in members
        if each.cause.get("out_of_memory") == "kernel log"
        and each.seen_alive_ns - soonest <= _KILL_TAKES_S * 1e9
    ]
    if len(out_of_memory) == 1:
        return out_of_memory, "evidence"
    if (requested := _requested_alone(members)) is not None:
        return [requested], "evidence"
    # A rank that raises closes its connections first, and may report it seconds later, when it
    # leaves. So among reported ends, a lost peer comes after a rank with another reason.
    reasons = {manner(each) for each in members} & {"own_cause", "exit_code"}
    causes = [each for each in members if not (reasons and manner(each) == "lost_peer")]
    soonest = min(each.ended_ns for each in causes)
    # A process was first if it was known to have ended while all others were still seen alive.
    early = [each for each in causes if each.seen_alive_ns < soonest or each.ended_ns == soonest]
    if len(early) == 1:
        early += [each for each in causes if _may_share_cause(early[0], each)]
    if len(early) == 1:
        earlier = any(each.ended_ns < early[0].seen_alive_ns for each in members)
        return early, "evidence" if earlier else "time"
    best = max(map(guilt, early))
    guilty = [each for each in early if guilt(each) == best]
    return (guilty, "evidence") if len(guilty) == 1 else (guilty, "unknown")


def _requested_alone(members: list[EndedProcess]) -> EndedProcess | None:
    """The one process that was asked to end while all others were there, which then lost it.

    A launcher asks the others only once one has left, so something else asked this one.
    """
    # The launcher may hurry a process that has reported its end; that did not end it.
    requested = [
        each for each in members if each.state == "killed" and each.cause.get("signal") in REQUESTS
    ]
    if len(requested) != 1 or len(members) == 1:
        return None
    (one,) = requested
    rest = [each for each in members if each is not one]
    outlived = all(each.last_present_ns > one.ended_ns for each in rest)
    return one if outlived and {manner(each) for each in rest} == {"lost_peer"} else None


def _may_share_cause(first: EndedProcess, other: EndedProcess) -> bool:
    """Whether one cause may have ended both, although one of them took longer to end.

    A person that ends all ranks sends the same signal to each, and so does a launcher that was
    asked to end; some ranks take a moment longer. Ranks that report the same reason were hit by
    the same code or data, and not by each other's end.
    """
    if other is not first and manner(first) == manner(other) and manner(first) != "killed":
        return without_numbers(first) == without_numbers(other)
    signal = first.cause.get("signal")
    return (
        other is not first
        and signal is not None
        and signal == other.cause.get("signal")
        and other.ended_ns - first.ended_ns <= _KILL_TAKES_S * 1e9
    )


def without_numbers(process: EndedProcess) -> str:
    """Its cause, without what differs between ranks: numbers of shards, devices, addresses."""
    return re.sub(r"0x[0-9a-fA-F]+|[\d.]+", "0", wording.cause(process))


def guilt(process: EndedProcess) -> int:
    """How strongly its end looks like a cause, and not like a consequence."""
    if process.cause.get("out_of_memory") == "kernel log":
        return 4
    signal = process.cause.get("signal")
    if process.state == "killed" and signal is not None:
        return 0 if signal in REQUESTS else 3
    if process.state != "killed":
        return 2 if manner(process) in ("own_cause", "exit_code") else 0
    return 2 if process.cause.get("exit_code") else 1
