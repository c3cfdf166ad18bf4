"""Finds the ranks that hold up the others, and the cause. The most reliable sign decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.say import UNHEARD, in_phase, rank_list, verb
from otel_ddp.diagnosis.stall.evidence import Collective, Frame, Group, Suspect
from otel_ddp.diagnosis.verdict import Labels

# Collectives whose tensors must have the same sizes on all ranks. In all others, sizes may differ.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")
# States of a collective in torch's flight recorder: "scheduled" is enqueued but not started on the
# device, "started" is running there.
_SCHEDULED, _STARTED = "scheduled", "started"

# By cause: description and advice for a rank that cannot continue.
_DISABLED = {
    "stopped": (
        "is stopped by a signal or a debugger",
        "Find out what stopped it; `kill -CONT` lets it go on.",
    ),
    "uninterruptible": (
        "is in I/O that cannot be interrupted",
        "Look at the disk, the network file system, the driver.",
    ),
    "gil": (
        "does not answer: C code in it holds the GIL",
        "Look at its native stack: `py-spy dump --native`.",
    ),
}
_ADVICE = {
    "different_collectives": "Look for a branch that not all ranks take, or a collective that one "
    "rank left out.",
    "crossed": "Each waits in a process group for another one: look at the order of their "
    "collectives.",
    "device": "A kernel launched before it does not end: look at this device's errors in `dmesg`, "
    "and at the kernels of that phase.",
    "gone": "Look at why it is gone; the others will not go on by themselves.",
    "elsewhere": "Look at the verdicts of the other nodes, and at the network between them.",
    "backend": "Look at the network, the backend's log (NCCL and RCCL: NCCL_DEBUG=INFO), "
    "and the GPUs' errors.",
    "left": "Its output says why it left, and `otel-ddp stacks` where its threads are. Create "
    "threads that need not finish with daemon=True.",
}
_LOOK = "Look at its stack: `otel-ddp stacks`."
# Advice by the phase of a rank that others wait for.
_OF_PHASE = {
    "data": "Look at its data loader and at what that reads from.",
    "checkpoint": 'Look at where it writes to; use phase("checkpoint", expect_s=...) if it may '
    "take longer.",
    "eval": 'Look at its evaluation; use phase("eval", expect_s=...) if it may take longer.',
    "compile": "Compilation takes long: look at its log (TORCH_LOGS=recompiles).",
    "other": f'{_LOOK} If that is an evaluation or a checkpoint, mark it: phase("eval") and '
    'phase("checkpoint") may take longer.',
}


class Findings(NamedTuple):
    """Which ranks hold up the others, and why."""

    cause: str
    culprits: tuple[str, ...]
    phase: str
    step: int | None
    why: str
    advice: str
    node: str
    """The node of all culprits; empty if they are on several nodes."""


def find_culprits(living: Sequence[Suspect], ended: Sequence[Suspect], floor_s: float) -> Findings:
    """Find the ranks that the living ranks wait for. *floor_s*: the shortest time without movement
    that counts as a stall."""
    return (
        _unheard(living)
        or _disabled(living, floor_s)
        or _different_collectives(living)
        or _behind(living)
        or _not_begun(living)
        or _computes(living)
        or _not_waiting(living)
        or _gone(living, ended)
        or _none_of_these(living, ended)
    )


def _findings(
    cause: str, living: Sequence[Suspect], culprits: Sequence[Suspect], why: list[str], advice: str
) -> Findings:
    positions = [each.position for each in culprits or living]
    nodes = {dict(each.labels).get("node", "") for each in culprits}
    phases = {each.name or each.phase for each in positions}
    return Findings(
        cause,
        tuple(
            sorted((each.position.rank for each in culprits), key=lambda rank: (len(rank), rank))
        ),
        phases.pop() if len(phases) == 1 else "mixed",
        min((each.step for each in positions if each.step is not None), default=None),
        "; ".join(why),
        advice,
        nodes.pop() if len(nodes) == 1 else "",
    )


# -- the signs, the most reliable first


def _unheard(living: Sequence[Suspect]) -> Findings | None:
    """Ranks on nodes whose data no longer arrives."""
    culprits = [each for each in living if not each.heard]
    if not culprits or len(culprits) == len(living):
        return None
    nodes = sorted({dict(each.labels).get("node", "?") for each in culprits})
    why = [
        f"{', '.join(nodes)} {verb(nodes, 'is', 'are')} no longer heard, with {_ranks(culprits)}"
    ]
    why += _waits(living, culprits)
    return _findings("unheard", living, culprits, why, UNHEARD)


def _disabled(living: Sequence[Suspect], floor_s: float) -> Findings | None:
    """Ranks that cannot continue, whatever the others do."""
    found = [(each, cause) for each in living if (cause := each.disabled_by(floor_s))]
    if not found:
        return None
    why = []
    for each, cause in found:
        kernel, more = each.known.kernel, ""
        if cause == "uninterruptible" and kernel is not None and kernel.waits_in:
            more = f" ({kernel.waits_in})"
        why.append(f"{each.name}, {_at(each)}, {_DISABLED[cause][0]}{more}")
    causes = list(dict.fromkeys(cause for _, cause in found))
    culprits = [each for each, _ in found]
    return _findings("+".join(causes), living, culprits, why, _DISABLED[causes[0]][1])


_Entered = list[tuple[Suspect, Collective]]


def _entered(living: Iterable[Suspect]) -> list[tuple[int, _Entered]]:
    """For each collective, sorted by number: its number, and the ranks that entered it."""
    # In a group with two backends (gloo for hosts, nccl for devices), each backend numbers its own
    # collectives, so the backend is part of the key.
    found: dict[tuple[str, str, int], dict[Labels, tuple[Suspect, Collective]]] = {}
    for each in living:
        for one in each.known.collectives:
            backend = one.op.partition(":")[0]
            by_rank = found.setdefault((backend, one.group, one.number), {})
            by_rank[each.labels] = each, one
    entered = [(number, [*each.values()]) for (_, _, number), each in found.items()]
    return sorted(entered, key=lambda each: each[0])


def _different_collectives(living: Sequence[Suspect]) -> Findings | None:
    """Ranks that entered a different collective than the others under the same number."""
    for number, entered in _entered(living):
        votes: dict[str, _Entered] = {}
        for each, one in entered:
            op = one.op.rpartition(":")[2]
            vote = f"{op} {one.sizes}" if op.startswith(_SAME_SIZES) else op
            votes.setdefault(vote, []).append((each, one))
        if len(votes) < 2:
            continue
        sizes = sorted(map(len, votes.values()))
        # Without a majority, either side may be wrong, so all ranks are culprits.
        tied = sizes[-1] == sizes[-2]
        culprits = [
            each for same in votes.values() if tied or len(same) < sizes[-1] for each, _ in same
        ]
        why = [
            f"{_ranks(each for each, _ in same)} entered {same[0][1]}" for same in votes.values()
        ]
        why[0] = f"as collective number {number}, {why[0]}"
        cause = "different_collectives"
        return _findings(cause, living, culprits, why, _ADVICE[cause])
    return None


def _behind(living: Sequence[Suspect], *, with_sends: bool = False) -> Findings | None:
    """Ranks that have not enqueued a collective in which other ranks wait.

    *with_sends*: also count sends and receives.
    """
    waiting: set[Labels] = set()
    gaps: dict[Labels, str] = {}
    what = "calls" if with_sends else "collectives"
    for members in _numbers(living, with_sends):
        most = max((enqueued for _, _, enqueued in members), default=0)
        for each, group, enqueued in members:
            for other, _, its_enqueued in members:
                # With NCCL, a device waits in the first collective that it has not completed:
                # number `done` + 1. It waits for the ranks that have not enqueued that one.
                done = group.device_completed
                if group.says_who_waits and (
                    its_enqueued < enqueued if done is None else its_enqueued <= done < enqueued
                ):
                    waiting.add(each.labels)
                    gaps[other.labels] = f", {its_enqueued} {what} entered (others up to {most})"
    behind = [each for each in living if each.labels in gaps]
    if not behind:
        return None
    # Leave out ranks that are behind only because they wait for a rank even further behind. Such a
    # wait may be invisible, in the user's `work.wait()`. So if some rank waits for nothing, take a
    # sleeping rank for waiting if the counts show that it needs another rank.
    free = [each for each in living if each.labels not in waiting and not each.is_waiting]
    late = [each for each in behind if not each.is_waiting]
    if free:
        late = [e for e in late if e.labels not in waiting or e.doing != "sleeps"] or free
    else:
        late += [each for each in behind if each.is_waiting and each.labels not in waiting]
    culprits = late or behind
    why = [_activity(each) + gaps.get(each.labels, "") for each in culprits]
    why += _waits(living, culprits)
    cause = "not_reached" if late else "crossed"
    advice = _advice(late[0]) if late else _ADVICE[cause]
    return _findings(cause, living, culprits, why, advice)


def _numbers(
    living: Sequence[Suspect], with_sends: bool
) -> Iterator[list[tuple[Suspect, Group, int]]]:
    """The members of each process group, and how many collectives each has entered."""
    groups: dict[str, list[tuple[Suspect, Group]]] = {}
    for each in living:
        for group in each.known.groups:
            if group.enqueued is not None and group.size > 1:
                groups.setdefault(group.name, []).append((each, group))
    for members in groups.values():
        # Healthy stages of a pipeline differ in how many sends and receives they have made, so
        # these calls are not counted.
        if with_sends or not any(group.sends for _, group in members):
            yield [(each, group, group.enqueued or 0) for each, group in members]
        else:
            yield [
                (each, group, (group.enqueued or 0) - group.sends)
                for each, group in members
                if group.sends is not None
            ]


def _not_begun(living: Sequence[Suspect]) -> Findings | None:
    """Ranks whose devices have not started a collective that other devices have started."""
    for number, entered in _entered(living):
        if not {one.state for _, one in entered} >= {_SCHEDULED, _STARTED}:
            continue
        # A device that has started another collective waits there, so it is not late.
        late = [
            (each, one)
            for each, one in entered
            if one.state == _SCHEDULED
            and all(other.state != _STARTED for other in each.known.collectives)
        ]
        if not late:
            continue
        why = []
        culprits = [each.on_device for each, _ in late]
        for (host, _), device in zip(late, culprits, strict=True):
            phase, line = device.known.device_phase, _at_line(host)
            why.append(
                f"the device of {device.name}{_after(device)} has not come to "
                f"{late[0][1]}, collective number {number}, which the host has enqueued"
                + (f", and is in {phase}" if phase else "")
                + (f", while its host is {_at(host)}{line}" if line else "")
            )
        why += _waits(living, culprits)
        return _findings("device", living, culprits, why, _ADVICE["device"])
    return None


def _computes(living: Sequence[Suspect]) -> Findings | None:
    """Ranks whose devices still compute what their hosts launched, while all others wait."""
    late = [each for each in living if each.device == "computes"]
    others = [each for each in living if each not in late]
    if not late or not others or not all(each.is_waiting for each in others):
        return None
    why = [
        f"the device of {each.name} is {_at(each.on_device)} and does not go on, "
        f"while its host is {_at(each)}{_at_line(each)}"
        for each in late
    ]
    why += _waits(living, late)
    return _findings("device", living, [each.on_device for each in late], why, _ADVICE["device"])


def _not_waiting(living: Sequence[Suspect]) -> Findings | None:
    """Ranks that do not wait for other ranks."""
    culprits = [each for each in living if not each.is_waiting]
    if not culprits:
        return None
    # If no rank seems to wait, all may in fact wait for messages in the user's `work.wait()`. Then
    # compare how many calls each rank has made, with sends and receives, to see which are behind.
    if len(culprits) == len(living) and (found := _behind(living, with_sends=True)):
        return found
    waits = _waits(living, culprits)
    why = [*map(_activity, culprits), *waits]
    cause = "not_reached" if waits else "long_phase"
    return _findings(cause, living, culprits, why, _advice(culprits[0]))


# -- all living ranks wait, and all have entered the same collectives


def _waiting(living: Sequence[Suspect]) -> str:
    return f"{_ranks(living)} {verb(living, 'waits', 'wait')}"


def _gone(living: Sequence[Suspect], ended: Sequence[Suspect]) -> Findings | None:
    """Ended ranks, if the living ranks wait for them."""
    dead = [each for each in ended if each.position.state != "finished"]
    culprits = dead or ended
    if not culprits:
        return None
    states = {each.position.state for each in culprits}
    did = states.pop() if states in ({"failed"}, {"finished"}) else "died"
    why = [_waiting(living), f"{_ranks(culprits)} {did}"]
    return _findings("dead" if dead else "finished", living, culprits, why, _ADVICE["gone"])


def _none_of_these(living: Sequence[Suspect], ended: Sequence[Suspect]) -> Findings:
    """All ranks wait: for a rank on another node, or because the collective itself hangs."""
    waiting = _waiting(living)
    if max((each.position.world or 0 for each in living), default=0) > len(living) + len(ended):
        why = [waiting, "the rank that they wait for is on another node, or the network is broken"]
        return _findings("elsewhere", living, (), why, _ADVICE["elsewhere"])
    why = [waiting, "none is known to hold up the others"]
    if full := [each for each in living if each.has_full_queue]:
        why.append(f"the launch queue of {_ranks(full)} is full")
    return _findings("backend", living, (), why, _ADVICE["backend"])


# -- in words


def _ranks(several: Iterable[Suspect]) -> str:
    return rank_list(each.labels for each in several)


def _activity(each: Suspect) -> str:
    """A clause on a rank's position and activity."""
    known = each.known
    if known.has_left:
        return (
            f"{each.name} has left its program{_after(each)}, at its end or by an exception, and "
            "waits for its other threads"
        )
    text = f"{each.name} is {_at(each)}{_at_line(each)}"
    if each.doing:
        text += f" and {each.doing}"
    if known.device_phase not in ("", each.position.phase):
        text += f", its device in {known.device_phase}"
    return text


def _waits(living: Sequence[Suspect], culprits: Sequence[Suspect]) -> list[str]:
    """A clause on the ranks that wait for the culprits, if there are any."""
    named = {each.labels for each in culprits}
    others = [each for each in living if each.labels not in named]
    if not others:
        return []
    return [f"{_ranks(others)} {verb(others, 'waits', 'wait')} for {verb(culprits, 'it', 'them')}"]


def _advice(each: Suspect) -> str:
    return _ADVICE["left"] if each.known.has_left else _OF_PHASE.get(each.position.phase, _LOOK)


def _at(each: Suspect) -> str:
    return f"{in_phase(each.position.name or each.position.phase)}{_after(each)}"


def _after(each: Suspect) -> str:
    return "" if each.position.step is None else f" after step {each.position.step}"


def _at_line(each: Suspect) -> str:
    frame = _own_line(each.known.stack)
    return f" at {frame}" if frame is not None else ""


def _own_line(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame outside of installed packages and Python; without one, the innermost."""
    # "/src/otel_ddp/" is the path of otel_ddp in an editable installation.
    others = ("/site-packages/", "/lib/python", "<frozen", "/src/otel_ddp/")
    own = (frame for frame in stack if not any(part in frame.file for part in others))
    return next(own, stack[0] if stack else None)
