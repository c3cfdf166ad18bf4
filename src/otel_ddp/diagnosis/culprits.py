"""Names the ranks that hold the others up, and why: the surest sign first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from otel_ddp.diagnosis.evidence import Collective, Evidence, Frame, Kernel, Position
from otel_ddp.diagnosis.verdict import Who

# A witness that has not answered for so long is kept from it: the interpreter's lock is held.
_SILENT_S, _SHORTEST_SILENCE_S = 5.0, 0.5
# Where these have another size on one rank than on the others, they do not belong together.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")
# Of the threads that somebody waits for at his end, so many are named.
_MOST_THREADS, _LONGEST_NAME = 3, 60
# Of a core. What sleeps takes nothing; what computes may have to share it with others.
_SHARE_BUSY = 0.1


class Findings(NamedTuple):
    """Who holds the others up, and why."""

    cause: str
    culprits: tuple[str, ...]
    phase: str
    step: int | None
    why: str
    look: str


def judge(
    living: Iterable[Who],
    found: Mapping[Who, Position],
    evidence: Mapping[Who, Evidence],
    floor_s: float,
) -> Findings:
    """Who holds the living up, by the surest sign that there is."""
    places = {who: found[who] for who in living}
    known = {who: evidence.get(who, Evidence()) for who in living}
    return (
        _disabled(places, known, floor_s)
        or _different(places, known)
        or _behind(places, known)
        or _not_waiting(places, known)
        or _left_alone(places, found)
    )


def reason(position: Position, known: Evidence, floor_s: float) -> str:
    """Why a rank does not move, as far as it can be seen on it alone: a word of the catalogue."""
    return _disabled_by(known, floor_s) or (
        "waiting" if _waiting(position, known) else "not_waiting"
    )


def _disabled_by(known: Evidence, floor_s: float) -> str:
    """What keeps a rank from going on by itself, if anything does."""
    kernel = known.kernel
    if kernel is not None and kernel.state in ("T", "t"):
        return "stopped"
    if kernel is not None and kernel.state == "D" and kernel.lasting:
        return "uninterruptible"
    patience_s = min(_SILENT_S, max(_SHORTEST_SILENCE_S, floor_s / 4))
    if known.silent_s is not None and known.silent_s >= patience_s:
        return "gil"
    return ""


def _disabled(
    places: Mapping[Who, Position], known: Mapping[Who, Evidence], floor_s: float
) -> Findings | None:
    """Ranks that cannot go on, whatever the others do."""
    causes = {who: cause for who, each in known.items() if (cause := _disabled_by(each, floor_s))}
    if not causes:
        return None
    said = []
    for who, cause in causes.items():
        kernel = known[who].kernel
        if cause == "stopped":
            what = "is stopped by a signal or a debugger"
        elif cause == "uninterruptible":
            inside = f" ({kernel.waits_in})" if kernel and kernel.waits_in else ""
            what = f"is in I/O that cannot be interrupted{inside}"
        else:
            doing = _doing(kernel) or "does not come back"
            what = f"does not answer: C code in it holds the GIL and {doing}"
        said.append(f"rank {places[who].rank}, {_at(places[who])}, {what}")
    look = {
        "stopped": "Look at who stopped it; `kill -CONT` lets it go on.",
        "uninterruptible": "Look at the disk, the network file system, the driver.",
        "gil": "Look at its native stack: `py-spy dump --native`.",
    }[next(iter(causes.values()))]
    return _findings("+".join(dict.fromkeys(causes.values())), causes, places, said, look)


def _different(places: Mapping[Who, Position], known: Mapping[Who, Evidence]) -> Findings | None:
    """Ranks that entered another collective than the others, under the same number."""
    entered: dict[tuple[str, int], dict[Who, Collective]] = {}
    for who, each in known.items():
        for one in each.collectives:
            entered.setdefault((one.group, one.number), {})[who] = one
    for (_, number), by_rank in sorted(entered.items(), key=lambda each: each[0][1]):
        votes: dict[str, list[Who]] = {}
        for who, one in by_rank.items():
            votes.setdefault(_signature(one), []).append(who)
        if len(votes) < 2:
            continue
        most = max(len(each) for each in votes.values())
        majority = [each for each in votes.values() if len(each) == most]
        # Of two, nobody can say who is right.
        culprits = [
            who for each in votes.values() if len(majority) > 1 or len(each) < most for who in each
        ]
        said = [f"{_ranks(places, each)} entered {by_rank[each[0]]}" for each in votes.values()]
        said[0] = f"as collective number {number}, {said[0]}"
        return _findings(
            "different_collectives",
            culprits,
            places,
            said,
            "Look for a branch that not all ranks take, or a collective that one of them left out.",
        )
    return None


def _signature(one: Collective) -> str:
    op = one.op.rpartition(":")[2]
    return f"{op} {one.sizes}" if op.startswith(_SAME_SIZES) else op


def _behind(places: Mapping[Who, Position], known: Mapping[Who, Evidence]) -> Findings | None:
    """Ranks that have put fewer collectives in line than others wait for."""
    waits_for: dict[Who, set[Who]] = {}
    numbers: dict[str, dict[Who, int]] = {}
    for who, each in known.items():
        for group in each.groups:
            if group.enqueued is not None and group.size > 1:
                numbers.setdefault(group.name, {})[who] = group.enqueued
    gaps: dict[Who, str] = {}
    for by_rank in numbers.values():
        most = max(by_rank.values())
        late = {who for who, number in by_rank.items() if number < most}
        for who in by_rank.keys() - late:
            waits_for.setdefault(who, set()).update(late)
        for who in late:
            gaps[who] = f"{by_rank[who]} collectives where others have entered {most}"
    if not gaps:
        return None
    # Who is late because he waits for somebody who is later is not to blame.
    culprits = [
        who for who in gaps if not (waits_for.get(who) and _waiting(places[who], known[who]))
    ]
    cause = "not_reached"
    if not culprits:
        cause, culprits = "crossed", list(gaps)
    said = [f"{_where(places[who], known[who])}, {gaps[who]}" for who in culprits]
    said += _who_waits(places, culprits)
    look = (
        "Each waits in a process group for another one: look at the order of their collectives."
        if cause == "crossed"
        else _advice(places[culprits[0]], known[culprits[0]], others_wait=True)
    )
    return _findings(cause, culprits, places, said, look)


def _not_waiting(places: Mapping[Who, Position], known: Mapping[Who, Evidence]) -> Findings | None:
    """Ranks that wait for nobody."""
    culprits = [who for who in places if not _waiting(places[who], known[who])]
    if not culprits:
        return None
    waits = _who_waits(places, culprits)
    said = [_where(places[who], known[who]) for who in culprits] + waits
    cause = "not_reached" if waits else "long_phase"
    look = _advice(places[culprits[0]], known[culprits[0]], others_wait=bool(waits))
    return _findings(cause, culprits, places, said, look)


def _who_waits(places: Mapping[Who, Position], culprits: list[Who]) -> list[str]:
    waiting = [who for who in places if who not in culprits]
    if not waiting:
        return []
    whom = "it" if len(culprits) == 1 else "them"
    return [f"{_ranks(places, waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {whom}"]


def _left_alone(places: Mapping[Who, Position], found: Mapping[Who, Position]) -> Findings:
    """Everybody waits, and all have come as far."""
    gone = [who for who, each in found.items() if who not in places and each.state != "finished"]
    left = [who for who, each in found.items() if who not in places and who not in gone]
    wait = "waits" if len(places) == 1 else "wait"
    waiting = f"{_ranks(places, list(places))} {wait} in the same collective"
    for cause, culprits, verb in (("dead", gone, "died"), ("finished", left, "finished")):
        if culprits:
            said = [waiting, f"{_ranks(found, culprits)} {verb} before it"]
            look = "Look at why it is gone; the others will not come back by themselves."
            return _findings(cause, culprits, found, said, look)
    world = max((each.world or 0 for each in places.values()), default=0)
    if world > len(found):
        said = [waiting, "whom they wait for is not on this node, or the network is broken"]
        look = "Look at the verdicts of the other nodes, and at the network between them."
        return _findings("elsewhere", (), places, said, look)
    look = "Look at the network, the backend's log (NCCL_DEBUG=INFO), and the GPUs' errors."
    return _findings("backend", (), places, [waiting, "it does not come to an end"], look)


def _waiting(position: Position, known: Evidence) -> bool:
    """Whether a rank waits for others, by what the journal or its own stack says."""
    if _has_left(known):
        return False
    if position.phase == "comm_wait":
        return True
    inside = bool(known.stack) and "torch/distributed/" in known.stack[0].file
    return inside or any(each.pending for each in known.groups)


def _findings(
    cause: str,
    culprits: Iterable[Who],
    places: Mapping[Who, Position],
    said: list[str],
    look: str,
) -> Findings:
    chosen = [places[who] for who in culprits]
    about = chosen or list(places.values())
    phases = {each.name or each.phase for each in about}
    steps = [each.step for each in about if each.step is not None]
    return Findings(
        cause,
        tuple(sorted((each.rank for each in chosen), key=lambda rank: (len(rank), rank))),
        phases.pop() if len(phases) == 1 else "mixed",
        min(steps, default=None),
        "; ".join(said),
        look,
    )


def _where(position: Position, known: Evidence) -> str:
    """What a rank is at, in words."""
    if _has_left(known):
        return (
            f"rank {position.rank} has left its program{_after(position)}, at its end or by an "
            f"exception, and waits for {_left_behind(known)}"
        )
    said = f"rank {position.rank} is {_at(position)}"
    if (frame := _own_line(known.stack, known.package)) is not None:
        said += f" at {frame}"
    if doing := _doing(known.kernel):
        said += f" and {doing}"
    return said


def _at(position: Position) -> str:
    return f"in {position.name or position.phase}{_after(position)}"


def _after(position: Position) -> str:
    return "" if position.step is None else f" after step {position.step}"


def _has_left(known: Evidence) -> bool:
    """Whether nothing of the program is left but threads that Python waits for at its end."""
    outermost = known.stack[-1] if known.stack else None
    return (
        outermost is not None
        and outermost.function == "_shutdown"
        and outermost.file.endswith("/threading.py")
    )


def _left_behind(known: Evidence) -> str:
    """The threads that the end of a program waits for, each with its line."""
    said = []
    for thread in known.helpers[:_MOST_THREADS]:
        frame = _own_line(thread.stack, known.package)
        said.append(thread.name[:_LONGEST_NAME] + ("" if frame is None else f" at {frame}"))
    if len(known.helpers) > _MOST_THREADS:
        said.append("...")
    many = "s" * (len(known.helpers) > 1)
    return f"its thread{many} {', '.join(said)}" if said else "its other threads"


def _doing(kernel: Kernel | None) -> str:
    if kernel is None or kernel.busy is None:
        return ""
    return "computes" if kernel.busy > _SHARE_BUSY else "sleeps"


def _own_line(stack: tuple[Frame, ...], package: str) -> Frame | None:
    """The innermost line that is neither a package's, ours among them, nor Python's.

    Else the innermost of all.
    """
    others = ("/site-packages/", "/lib/python", "<frozen", *((package,) if package else ()))
    for frame in stack:
        if not any(part in frame.file for part in others):
            return frame
    return stack[0] if stack else None


_ADVICE = {
    "data": "Look at its data loader and at what that reads from.",
    "checkpoint": 'Look at where it writes to; say phase("checkpoint", expect_s=...) '
    "where it may take longer.",
    "eval": 'Look at its evaluation; say phase("eval", expect_s=...) where it may take longer.',
    "compile": "Compilation takes long: look at its log (TORCH_LOGS=recompiles).",
}


def _advice(position: Position, known: Evidence, *, others_wait: bool) -> str:
    if _has_left(known):
        return "Its output says why it left. Make threads that nobody has to wait for daemons."
    advice = _ADVICE.get(position.phase, "Look at its stack: `otel-ddp stacks`.")
    if position.phase == "other" and others_wait:
        advice += (
            ' If that is an evaluation or a checkpoint, say so: phase("eval") and '
            'phase("checkpoint") may take longer.'
        )
    return advice


def _ranks(places: Mapping[Who, Position], chosen: list[Who]) -> str:
    numbers = sorted((places[who].rank for who in chosen), key=lambda rank: (len(rank), rank))
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
