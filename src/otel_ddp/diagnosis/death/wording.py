"""Puts the ends of processes into words: how, where, why, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from otel_ddp.diagnosis.death.ended_process import REQUESTS, EndedProcess, manner, rank_key
from otel_ddp.diagnosis.verdict import Labels

_MOST_REASONS = 3
_LONGEST_REASON = 200
# A process that held this share of its memory limit may have died of that.
_NEARLY_FULL = 0.8
_CRASHES = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code gave up: look at the last lines that it printed",
}
WATCHDOG = ". Most likely the watchdog of NCCL, which ends ranks whose collectives do not end"
_REQUESTED = "a launcher, a scheduler or a person asked it to end"


def within(processes: Sequence[EndedProcess]) -> str:
    """How far apart their ends may be."""
    soonest_ns = min(each.seen_alive_ns for each in processes)
    return _seconds((max(each.ended_ns for each in processes) - soonest_ns) / 1e9)


def where(processes: Sequence[EndedProcess]) -> str:
    """The phase and the step that they ended in."""
    phases = {each.phase for each in processes}
    steps = [each.step for each in processes if each.step is not None]
    where = f"in {phases.pop()}" if len(phases) == 1 else "in different phases"
    return f"{where} at step {max(steps)}" if steps else where


def how_it_ended(process: EndedProcess) -> str:
    """How it ended, and where."""
    if process.state == "failed":
        verb = "failed"
    elif process.state == "finished":
        verb = "ended"
    elif "exit_code" in process.cause:
        verb = "left without a word"
    else:
        verb = "was killed"
    at = "before its first step" if process.step is None else f"at step {process.step}"
    return f"{verb} in {process.phase} {at}{_time_in_phase(process)}"


def _time_in_phase(process: EndedProcess) -> str:
    """How long it had been in its phase, as precisely as that is known."""
    least_s = (process.seen_alive_ns - process.phase_since_ns) / 1e9
    most_s = (process.ended_ns - process.phase_since_ns) / 1e9
    if most_s <= 0:
        return ""
    if least_s >= 0.8 * most_s:
        return f", {_seconds(least_s)} into it"
    return f", less than {_seconds(most_s)} into it"


def cause(process: EndedProcess, sizes: bool = True) -> str:
    """Why it ended, in full; *sizes*: with the memory that it held."""
    cause = process.cause
    if cause.get("out_of_memory") == "kernel log":
        return _out_of_memory_kill(cause, sizes)
    if cause.get("out_of_memory") == "cgroup events":
        kills, within = cause.get("out_of_memory_kills", 1), cause.get("out_of_memory_within_s", 0)
        return (
            f"most likely the kernel's out-of-memory killer: it killed {kills} "
            f"process{'' if kills == 1 else 'es'} of its memory cgroup within {_seconds(within)}"
        )
    if process.state == "failed":
        reason = process.reason or "it gave no reason"
        return f"{reason}, {_REQUESTED}" if manner(process) == "requested" else reason
    signal = cause.get("signal")
    if signal is not None:
        why = _REQUESTED if signal in REQUESTS else _CRASHES.get(signal, "")
        return f"{signal}, {why}" if why else str(signal)
    if error := cause.get("launcher_error"):
        return str(error)
    if code := cause.get("exit_code"):
        return f"exit code {code}"
    return "the cause is not known here"


def short_cause(process: EndedProcess) -> str:
    """Why it ended, in one line of bounded length."""
    return short(cause(process))


def short(text: str) -> str:
    """The first line, cut where it is too long: the evidence has the whole text."""
    line, _, rest = text.strip().partition("\n")
    cut = line[:_LONGEST_REASON].rstrip()
    return f"{cut} [...]" if rest or len(cut) < len(line.rstrip()) else cut


def _out_of_memory_kill(cause: Mapping[str, object], sizes: bool) -> str:
    scopes = {"node": "the node was out of memory", "memory cgroup": "its memory cgroup was full"}
    scope = scopes.get(str(cause.get("out_of_memory_in")), "")
    resident = cause.get("resident_bytes")
    held = f"it held {_gib(resident)}" if sizes and isinstance(resident, int) else ""
    details = "; ".join(filter(None, (scope, held)))
    return "the kernel's out-of-memory killer" + (f" ({details})" if details else "")


def hints(process: EndedProcess) -> str:
    """What may have to do with its end: never a proof."""
    cause, hints = process.cause, []
    resident, limit = cause.get("resident_bytes"), cause.get("memory_limit_bytes")
    if (
        "out_of_memory" not in cause
        and process.state == "killed"
        and isinstance(resident, int)
        and isinstance(limit, int)
        and resident >= _NEARLY_FULL * limit
    ):
        owner = cause.get("memory_limit_of", "")
        hints.append(f"it held {_gib(resident)} of the {owner}'s {_gib(limit)} a moment before")
    hints += [f"the GPU driver reported {text}" for text in cause.get("xid", ())]
    return "".join(f"; {hint}" for hint in hints)


def what_followed(origin: EndedProcess, others: list[EndedProcess]) -> str:
    """What became of the other ranks, in a sentence or two."""
    killed = [each for each in others if each.state == "killed"]
    parts = []
    if killed:
        after_s = (max(each.ended_ns for each in killed) - origin.ended_ns) / 1e9
        when = f" within {_seconds(after_s)}" if after_s > 0 else ""
        text = names(e.labels for e in killed)
        if all(each.cause.get("signal") in REQUESTS for each in killed):
            parts.append(f"the launcher ended {text} after it{when}")
        else:
            parts.append(f"{text} ended after it{when}, as a launcher ends the rest of a run")
    if lost := [each for each in others if manner(each) == "lost_peer"]:
        its = "its connection" if len(lost) == 1 else "their connections"
        parts.append(f"{names(e.labels for e in lost)} lost {its} and failed")
    if requested := [each for each in others if manner(each) == "requested"]:
        was = "was" if len(requested) == 1 else "were"
        parts.append(f"{names(e.labels for e in requested)} {was} asked to end")
    rest = [each for each in others if manner(each) in ("own_cause", "exit_code")]
    parts += [
        f"{names([each.labels])} failed too: {short_cause(each)}" for each in rest[:_MOST_REASONS]
    ]
    if more := rest[_MOST_REASONS:]:
        parts.append(f"{names(e.labels for e in more)} failed too")
    return capitalized("; ".join(parts))


def each_cause(processes: Sequence[EndedProcess]) -> str:
    """The causes of the first few, each with its rank."""
    shown = processes[:_MOST_REASONS]
    parts = [f"{names([each.labels])}: {short_cause(each)}" for each in shown]
    if more := len(processes) - len(shown):
        parts.append(f"and {more} more")
    return "; ".join(parts)


def capitalized(text: str) -> str:
    """The text with a capital first letter, and the rest as it is."""
    return text[:1].upper() + text[1:]


def name_and_node(labels: Labels) -> str:
    """`rank 3 (node-1)`; a process without a rank is `process 4711 (node-1)`."""
    found = dict(labels)
    return f"{_name(found)} ({found.get('node', '')})"


def names(several: Iterable[Labels]) -> str:
    """`rank 3`, or `ranks 1, 3 and 5`."""
    found = [dict(labels) for labels in sorted(several, key=rank_key)]
    if len(found) == 1:
        return _name(found[0])
    numbers = [each.get("rank", "") for each in found]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _name(labels: Mapping[str, str]) -> str:
    rank = labels.get("rank", "")
    # A process without a rank has `p` and its process id in its place.
    return f"process {rank[1:]}" if rank.startswith("p") else f"rank {rank}"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
