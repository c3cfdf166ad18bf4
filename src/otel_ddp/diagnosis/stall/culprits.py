"""Finds the ranks that hold up the others, and why: the surest sign decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from otel_ddp.diagnosis.say import rank_list, verb
from otel_ddp.diagnosis.stall import wording
from otel_ddp.diagnosis.stall.evidence import Collective, Evidence, Group, Position
from otel_ddp.diagnosis.verdict import Labels

# A thread for stack questions that is silent for so long cannot run: something holds the GIL.
_SILENT_S, _SHORTEST_SILENCE_S = 5.0, 0.5
# These need the same sizes on all ranks. Where one rank's differ, the calls do not match.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")

# What torch's recorder for nccl says of a collective that its device has not come to, and is in.
_SCHEDULED, _STARTED = "scheduled", "started"

_Positions = Mapping[Labels, Position]
_Known = Mapping[Labels, Evidence]


class Findings(NamedTuple):
    """Which ranks hold up the others, and why."""

    cause: str
    culprits: tuple[str, ...]
    phase: str
    step: int | None
    why: str
    advice: str


def find_culprits(
    living: Iterable[Labels], found: _Positions, evidence: _Known, floor_s: float
) -> Findings:
    """Which ranks hold up the living ones, by the surest sign that there is.

    *found* has the positions of all ranks, of those that have ended too.
    """
    positions = {labels: found[labels] for labels in living}
    known = {labels: evidence.get(labels, Evidence()) for labels in living}
    return (
        _disabled(positions, known, floor_s)
        or _different_collectives(positions, known)
        or _behind(positions, known)
        or _not_begun(positions, known)
        or _computes(positions, known)
        or _not_waiting(positions, known)
        or _all_wait(positions, known, found)
    )


def stall_reason(position: Position, known: Evidence, floor_s: float) -> str:
    """Why a rank does not move, as far as the rank alone shows it: a word of the catalogue."""
    return _disabled_by(position, known, floor_s) or (
        "waiting" if _is_waiting(position, known) else "not_waiting"
    )


# -- the signs, the surest first


def _disabled_by(position: Position, known: Evidence, floor_s: float) -> str:
    """What keeps a rank from going on, whatever the others do; empty: nothing."""
    kernel = known.kernel
    if kernel is not None and kernel.state in ("T", "t"):
        return "stopped"
    if kernel is not None and kernel.state == "D" and kernel.lasting:
        return "uninterruptible"
    patience_s = min(_SILENT_S, max(_SHORTEST_SILENCE_S, floor_s / 4))
    # Our own mark may hold the GIL. It waits for the device.
    if known.silent_s is not None and known.silent_s >= patience_s and not position.in_mark:
        return "gil"
    return ""


def _disabled(positions: _Positions, known: _Known, floor_s: float) -> Findings | None:
    """Ranks that cannot go on, whatever the others do."""
    causes = {
        labels: cause
        for labels, each in known.items()
        if (cause := _disabled_by(positions[labels], each, floor_s))
    }
    if not causes:
        return None
    why = [
        wording.disabled(positions[labels], known[labels], cause)
        for labels, cause in causes.items()
    ]
    advice = wording.DISABLED_ADVICE[next(iter(causes.values()))]
    return _findings("+".join(dict.fromkeys(causes.values())), causes, positions, why, advice)


def _different_collectives(positions: _Positions, known: _Known) -> Findings | None:
    """Ranks that entered another collective than the others, under the same number."""
    for (_, number), by_rank in _entered(known):
        votes: dict[str, list[Labels]] = {}
        for labels, one in by_rank.items():
            votes.setdefault(_signature(one), []).append(labels)
        if len(votes) < 2:
            continue
        most = max(len(each) for each in votes.values())
        majority = [each for each in votes.values() if len(each) == most]
        # Of two ranks, it is not known which one is right.
        culprits = [
            labels
            for each in votes.values()
            if len(majority) > 1 or len(each) < most
            for labels in each
        ]
        why = [f"{rank_list(each)} entered {by_rank[each[0]]}" for each in votes.values()]
        why[0] = f"as collective number {number}, {why[0]}"
        advice = (
            "Look for a branch that not all ranks take, or a collective that one rank left out."
        )
        return _findings("different_collectives", culprits, positions, why, advice)
    return None


def _entered(known: _Known) -> list[tuple[tuple[str, int], dict[Labels, Collective]]]:
    """Who has entered each collective, by group and number, those of the least number first."""
    # A group that has gloo for the hosts and nccl for the devices counts them apart.
    found: dict[tuple[str, str, int], dict[Labels, Collective]] = {}
    for labels, each in known.items():
        for one in each.collectives:
            backend = one.op.partition(":")[0]
            found.setdefault((backend, one.group, one.number), {})[labels] = one
    entered = [((group, number), by_rank) for (_, group, number), by_rank in found.items()]
    return sorted(entered, key=lambda each: each[0][1])


def _signature(one: Collective) -> str:
    op = one.op.rpartition(":")[2]
    return f"{op} {one.sizes}" if op.startswith(_SAME_SIZES) else op


def _behind(positions: _Positions, known: _Known) -> Findings | None:
    """Ranks that have put fewer collectives in line than other ranks wait for."""
    waits_for: dict[Labels, set[Labels]] = {}
    groups: dict[str, dict[Labels, Group]] = {}
    for labels, each in known.items():
        for group in each.groups:
            if group.enqueued is not None and group.size > 1:
                groups.setdefault(group.name, {})[labels] = group
    gaps: dict[Labels, str] = {}
    for by_rank in groups.values():
        for labels, group in by_rank.items():
            for other, its in by_rank.items():
                if _waits_for(group, its):
                    waits_for.setdefault(labels, set()).add(other)
                    gaps[other] = (
                        f"{its.enqueued} collectives where others have entered "
                        f"{max(each.enqueued or 0 for each in by_rank.values())}"
                    )
    if not gaps:
        return None
    # A rank that is late because it waits for a later one is not to blame.
    culprits = [
        labels
        for labels in gaps
        if not (waits_for.get(labels) and _is_waiting(positions[labels], known[labels]))
    ]
    cause = "not_reached"
    if not culprits:
        cause, culprits = "crossed", list(gaps)
    why = [
        f"{wording.activity(positions[labels], known[labels])}, {gaps[labels]}"
        for labels in culprits
    ]
    why += wording.waiting_ranks(positions, culprits)
    advice = (
        "Each waits in a process group for another one: look at the order of their collectives."
        if cause == "crossed"
        else wording.advice(positions[culprits[0]], known[culprits[0]], others_wait=True)
    )
    return _findings(cause, culprits, positions, why, advice)


def _waits_for(one: Group, other: Group) -> bool:
    """Whether a rank waits until another one puts its next collective in line."""
    assert one.enqueued is not None
    assert other.enqueued is not None
    if not one.says_who_waits:
        return False
    if (completed := one.device_completed) is None:
        return other.enqueued < one.enqueued
    # What the device waits in comes after its last one.
    return other.enqueued <= completed < one.enqueued


def _not_begun(positions: _Positions, known: _Known) -> Findings | None:
    """Ranks whose devices have not come to a collective that the devices of others are in."""
    inside = {
        labels
        for labels, each in known.items()
        if any(one.state == _STARTED for one in each.collectives)
    }
    for (_, number), by_rank in _entered(known):
        states = {one.state for one in by_rank.values()}
        if not states >= {_SCHEDULED, _STARTED}:
            continue
        # A device that is in another collective waits there.
        culprits = [
            labels
            for labels, one in by_rank.items()
            if one.state == _SCHEDULED and labels not in inside
        ]
        if not culprits:
            continue
        what = f"{by_rank[culprits[0]]}, collective number {number}"
        on_device = {labels: _on_device(positions[labels], known[labels]) for labels in culprits}
        why = [wording.device(on_device[labels], known[labels], what) for labels in culprits]
        why += wording.waiting_ranks(positions, culprits)
        return _findings("device", culprits, on_device, why, wording.DEVICE_ADVICE)
    return None


def _computes(positions: _Positions, known: _Known) -> Findings | None:
    """Ranks whose devices are in what their hosts have long launched, while others wait."""
    doing = {labels: _device(positions[labels], known[labels]) for labels in positions}
    culprits = [labels for labels in positions if doing[labels] == "computes"]
    others = [labels for labels in positions if labels not in culprits]
    if not culprits or not others:
        return None
    if not all(_is_waiting(positions[labels], known[labels]) for labels in others):
        return None
    on_device = {labels: _on_device(positions[labels], known[labels]) for labels in culprits}
    why = [wording.device_behind(on_device[labels], positions[labels]) for labels in culprits]
    why += wording.waiting_ranks(positions, culprits)
    return _findings("device", culprits, on_device, why, wording.DEVICE_ADVICE)


def _device(position: Position, known: Evidence) -> Literal["", "computes", "waits"]:
    """What the device of a rank does that is behind its host; "waits": at least it may."""
    phase = known.device_phase
    if not phase or (known.device_step is None and phase == position.phase):
        return ""
    may_wait = position.waits_in is None or phase in (*position.waits_in, "comm_wait")
    return "waits" if may_wait else "computes"


def _on_device(position: Position, known: Evidence) -> Position:
    """Where the device of a rank is, as far as that is known."""
    if not known.device_phase:
        return position
    step = position.step if known.device_step is None else known.device_step
    return position._replace(phase=known.device_phase, name="", step=step)


def _not_waiting(positions: _Positions, known: _Known) -> Findings | None:
    """Ranks that do not wait for others."""
    culprits = [labels for labels in positions if not _is_waiting(positions[labels], known[labels])]
    if not culprits:
        return None
    waits = wording.waiting_ranks(positions, culprits)
    why = [wording.activity(positions[labels], known[labels]) for labels in culprits] + waits
    cause = "not_reached" if waits else "long_phase"
    advice = wording.advice(positions[culprits[0]], known[culprits[0]], others_wait=bool(waits))
    return _findings(cause, culprits, positions, why, advice)


def _all_wait(positions: _Positions, known: _Known, found: _Positions) -> Findings:
    """All living ranks wait, and all have come equally far."""
    ended = [labels for labels in found if labels not in positions]
    dead = [labels for labels in ended if found[labels].state != "finished"]
    finished = [labels for labels in ended if labels not in dead]
    wait = verb(positions, "waits", "wait")
    waiting = f"{rank_list(positions)} {wait} in the same collective"
    died = "failed" if {found[labels].state for labels in dead} == {"failed"} else "died"
    for cause, culprits, did in (("dead", dead, died), ("finished", finished, "finished")):
        if culprits:
            why = [waiting, f"{rank_list(culprits)} {did} before it"]
            advice = "Look at why it is gone; the others will not go on by themselves."
            return _findings(cause, culprits, found, why, advice)
    world = max((each.world or 0 for each in positions.values()), default=0)
    if world > len(found):
        why = [waiting, "the rank that they wait for is on another node, or the network is broken"]
        advice = "Look at the verdicts of the other nodes, and at the network between them."
        return _findings("elsewhere", (), positions, why, advice)
    if full := [
        labels for labels in positions if _has_full_queue(positions[labels], known[labels])
    ]:
        why = wording.full_queues(positions, full)
        return _findings("backend", (), positions, why, wording.BACKEND_ADVICE)
    if untimed := _untimed(known):
        why = [waiting, f"it does not end ({untimed})"]
        advice = f"{wording.UNTIMED_ADVICE} {wording.BACKEND_ADVICE}"
        return _findings("backend", (), positions, why, advice)
    findings = _where_it_does_not_end(positions, known, waiting)
    return _findings("backend", *findings, wording.BACKEND_ADVICE)


def _untimed(known: _Known) -> str:
    """The first collective under way, where torch tells of no device whether it is in one."""
    # Gloo has all its collectives as scheduled, also those that have ended.
    under_way = [
        one for each in known.values() for one in each.collectives if one.op.startswith("nccl:")
    ]
    if {one.state for one in under_way} != {_SCHEDULED}:
        return ""
    first = min(under_way, key=lambda one: one.number)
    return f"{first}, collective number {first.number}"


def _where_it_does_not_end(
    positions: _Positions, known: _Known, waiting: str
) -> tuple[list[Labels], _Positions, list[str]]:
    """The ranks on which a collective goes on that has ended on others, and what to say of it."""
    for (group, number), by_rank in _entered(known):
        inside = [labels for labels, one in by_rank.items() if one.state == _STARTED]
        done = [
            labels
            for labels, each in known.items()
            if any(g.name == group and (g.completed or 0) >= number for g in each.groups)
        ]
        if not inside:
            continue
        what = f"{by_rank[inside[0]]}, collective number {number}"
        if done:
            names = rank_list(done), rank_list(inside)
            return inside, positions, [f"{what}, has ended on {names[0]} and goes on on {names[1]}"]
        if len(inside) == len(positions):
            return [], positions, [waiting, f"all devices are in it ({what})", "it does not end"]
    return [], positions, [waiting, "it does not end"]


def _is_waiting(position: Position, known: Evidence) -> bool:
    """Whether a rank waits for others, by its journal, its own stack, or its device."""
    if known.has_left:
        return False
    if position.phase == "comm_wait" or _has_full_queue(position, known):
        return True
    if _device(position, known) == "waits":
        return True
    inside = bool(known.stack) and "torch/distributed/" in known.stack[0].file
    return inside or any(each.pending for each in known.groups)


def _has_full_queue(position: Position, known: Evidence) -> bool:
    """Whether a host waits in our mark for its device, of which nothing can be known then."""
    return position.in_mark and not known.device_phase


def _findings(
    cause: str, culprits: Iterable[Labels], positions: _Positions, why: list[str], advice: str
) -> Findings:
    chosen = [positions[labels] for labels in culprits]
    about = chosen or list(positions.values())
    phases = {each.name or each.phase for each in about}
    steps = [each.step for each in about if each.step is not None]
    return Findings(
        cause,
        tuple(sorted((each.rank for each in chosen), key=lambda rank: (len(rank), rank))),
        phases.pop() if len(phases) == 1 else "mixed",
        min(steps, default=None),
        "; ".join(why),
        advice,
    )
