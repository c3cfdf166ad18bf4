"""Puts into words what a rank does while the run stands still, and what to look at."""

from __future__ import annotations

from collections.abc import Mapping

from otel_ddp.diagnosis.say import plural, rank_list, verb
from otel_ddp.diagnosis.stall.evidence import Evidence, Frame, Kernel, Position
from otel_ddp.diagnosis.verdict import Labels

# So many threads are named of those that the end of a program waits for.
_MOST_THREADS, _LONGEST_NAME = 3, 60
# Share of a core. A sleeping thread takes none; a busy one may have to share the core.
_BUSY = 0.1

DISABLED_ADVICE = {
    "stopped": "Find out what stopped it; `kill -CONT` lets it go on.",
    "uninterruptible": "Look at the disk, the network file system, the driver.",
    "gil": "Look at its native stack: `py-spy dump --native`.",
}
DEVICE_ADVICE = (
    "What was launched before it does not end: look at this GPU's errors (Xid), and at the kernels "
    "of that phase."
)
BACKEND_ADVICE = "Look at the network, the backend's log (NCCL_DEBUG=INFO), and the GPUs' errors."
UNTIMED_ADVICE = (
    "Set TORCH_NCCL_ENABLE_TIMING=1 before the process group is made: then it is known which "
    "devices are in it."
)
_ADVICE = {
    "data": "Look at its data loader and at what that reads from.",
    "checkpoint": 'Look at where it writes to; say phase("checkpoint", expect_s=...) '
    "where it may take longer.",
    "eval": 'Look at its evaluation; say phase("eval", expect_s=...) where it may take longer.',
    "compile": "Compilation takes long: look at its log (TORCH_LOGS=recompiles).",
}


def disabled(position: Position, known: Evidence, cause: str) -> str:
    """That a rank cannot go on, and why."""
    kernel = known.kernel
    if cause == "stopped":
        what = "is stopped by a signal or a debugger"
    elif cause == "uninterruptible":
        inside = f" ({kernel.waits_in})" if kernel and kernel.waits_in else ""
        what = f"is in I/O that cannot be interrupted{inside}"
    else:
        doing = _doing(kernel) or "does not return"
        what = f"does not answer: C code in it holds the GIL and {doing}"
    return f"rank {position.rank}, {_at(position)}, {what}"


def device(position: Position, known: Evidence, what: str) -> str:
    """That the device of a rank has not come to a collective that its host has put in line."""
    where = f", it is in {known.device_phase}" if known.device_phase else ""
    return (
        f"the device of rank {position.rank}{_after(position)} has not come to {what}, which the "
        f"host has put in line{where}"
    )


def device_behind(on_device: Position, position: Position) -> str:
    """That the device of a rank does not end what its host has launched, and is done with."""
    return (
        f"the device of rank {position.rank} is {_at(on_device)} and does not go on, while its "
        f"host is {_at(position)}"
    )


def full_queues(positions: Mapping[Labels, Position], full: list[Labels]) -> list[str]:
    """That hosts wait for room, so that their devices cannot be asked."""
    others = [labels for labels in positions if labels not in full]
    return [f"{rank_list(others)} {verb(others, 'waits', 'wait')} in a collective"] * bool(
        others
    ) + [
        f"the launch queue of {rank_list(full)} is full, where otel_ddp itself waits for a "
        "place: what the device is in cannot be asked"
    ]


def activity(position: Position, known: Evidence) -> str:
    """Where a rank is and what it does there."""
    if known.has_left:
        return (
            f"rank {position.rank} has left its program{_after(position)}, at its end or by an "
            f"exception, and waits for {_remaining_threads(known)}"
        )
    text = f"rank {position.rank} is {_at(position)}"
    if (frame := _own_line(known.stack, known.package)) is not None:
        text += f" at {frame}"
    if doing := _doing(known.kernel):
        text += f" and {doing}"
    if known.device_phase not in ("", position.phase):
        text += f", its device in {known.device_phase}"
    return text


def waiting_ranks(positions: Mapping[Labels, Position], culprits: list[Labels]) -> list[str]:
    """That all other ranks wait for the culprits; nothing where there are no others."""
    waiting = [labels for labels in positions if labels not in culprits]
    if not waiting:
        return []
    them = verb(culprits, "it", "them")
    return [f"{rank_list(waiting)} {verb(waiting, 'waits', 'wait')} for {them}"]


def advice(position: Position, known: Evidence, *, others_wait: bool) -> str:
    """What to look at."""
    if known.has_left:
        return "Its output says why it left. Make threads that need not finish daemons."
    advice = _ADVICE.get(position.phase, "Look at its stack: `otel-ddp stacks`.")
    if position.phase == "other" and others_wait:
        advice += (
            ' If that is an evaluation or a checkpoint, say so: phase("eval") and '
            'phase("checkpoint") may take longer.'
        )
    return advice


def _at(position: Position) -> str:
    return f"in {position.name or position.phase}{_after(position)}"


def _after(position: Position) -> str:
    return "" if position.step is None else f" after step {position.step}"


def _remaining_threads(known: Evidence) -> str:
    """The threads that the end of a program waits for, each with its line."""
    names = []
    for thread in known.other_threads[:_MOST_THREADS]:
        frame = _own_line(thread.stack, known.package)
        names.append(thread.name[:_LONGEST_NAME] + ("" if frame is None else f" at {frame}"))
    if len(known.other_threads) > _MOST_THREADS:
        names.append("...")
    return (
        f"its thread{plural(known.other_threads)} {', '.join(names)}"
        if names
        else "its other threads"
    )


def _doing(kernel: Kernel | None) -> str:
    if kernel is None or kernel.busy is None:
        return ""
    return "computes" if kernel.busy > _BUSY else "sleeps"


def _own_line(stack: tuple[Frame, ...], package: str) -> Frame | None:
    """The innermost line of the user's own code; where there is none, the innermost of all.

    Lines of installed packages, of Python and of our own *package* are not the user's.
    """
    others = ("/site-packages/", "/lib/python", "<frozen", *((package,) if package else ()))
    for frame in stack:
        if not any(part in frame.file for part in others):
            return frame
    return stack[0] if stack else None
