"""The ends of processes in words: how, where, why, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from otel_ddp.diagnosis.ends import REQUESTS, Gone, manner, rank_key
from otel_ddp.diagnosis.verdict import Who

_MOST_REASONS = 3
_LONGEST_REASON = 200
_FULL = 0.8
_CRASHES = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code gave up: look at the last lines that it printed",
}
_REQUESTED = "somebody asked it to end: a launcher, a scheduler, or a person"


def within(gone: Sequence[Gone]) -> str:
    """How far apart their ends may be."""
    soonest_ns = min(each.seen_alive_ns for each in gone)
    return _seconds((max(each.gone_ns for each in gone) - soonest_ns) / 1e9)


def where(gone: Sequence[Gone]) -> str:
    phases = {each.phase for each in gone}
    steps = [each.step for each in gone if each.step is not None]
    where = f"in {phases.pop()}" if len(phases) == 1 else "in different phases"
    return f"{where} at step {max(steps)}" if steps else where


def end(gone: Gone) -> str:
    """How it ended, and where."""
    if gone.state == "failed":
        verb = "failed"
    elif gone.state == "finished":
        verb = "ended"
    elif "exit_code" in gone.cause:
        verb = "left without a word"
    else:
        verb = "was killed"
    at = "before its first step" if gone.step is None else f"at step {gone.step}"
    return f"{verb} in {gone.phase} {at}{_into(gone)}"


def _into(gone: Gone) -> str:
    """How long it had been in its phase, as well as that can be known."""
    least_s = (gone.seen_alive_ns - gone.phase_since_ns) / 1e9
    most_s = (gone.gone_ns - gone.phase_since_ns) / 1e9
    if most_s <= 0:
        return ""
    if least_s >= 0.8 * most_s:
        return f", {_seconds(least_s)} into it"
    return f", less than {_seconds(most_s)} into it"


def because(gone: Gone, sizes: bool = True) -> str:
    cause = gone.cause
    resident = cause.get("resident_bytes")
    if cause.get("out_of_memory") == "kernel log":
        of = {"node": "the node was out of memory", "memory cgroup": "its memory cgroup was full"}
        scope = of.get(str(cause.get("out_of_memory_in")), "")
        held = f"it held {_gib(resident)}" if sizes and isinstance(resident, int) else ""
        told = "; ".join(filter(None, (scope, held)))
        return "the kernel's out-of-memory killer" + (f" ({told})" if told else "")
    if cause.get("out_of_memory") == "cgroup events":
        kills, within = cause.get("out_of_memory_kills", 1), cause.get("out_of_memory_within_s", 0)
        return (
            f"most likely the kernel's out-of-memory killer: it killed {kills} "
            f"process{'' if kills == 1 else 'es'} of its memory cgroup within {_seconds(within)}"
        )
    if gone.state == "failed":
        reason = gone.reason or "it gave no reason"
        return f"{reason}, {_REQUESTED}" if manner(gone) == "asked" else reason
    signal = cause.get("signal")
    if signal is not None:
        why = _CRASHES.get(signal, "")
        if signal in REQUESTS:
            why = _REQUESTED
        return f"{signal}, {why}" if why else str(signal)
    if said := cause.get("launcher_error"):
        return str(said)
    if code := cause.get("exit_code"):
        return f"exit code {code}"
    return "by whom or what is not known here"


def hints(gone: Gone) -> str:
    """What may have to do with it: never a proof."""
    cause, hints = gone.cause, []
    resident, limit = cause.get("resident_bytes"), cause.get("memory_limit_bytes")
    if (
        "out_of_memory" not in cause
        and gone.state == "killed"
        and isinstance(resident, int)
        and isinstance(limit, int)
        and resident >= _FULL * limit
    ):
        whose = cause.get("memory_limit_of", "")
        hints.append(f"it held {_gib(resident)} of the {whose}'s {_gib(limit)} a moment before")
    hints += [f"the GPU driver reported {text}" for text in cause.get("xid", ())]
    return "".join(f"; {hint}" for hint in hints)


def followed(origin: Gone, others: list[Gone]) -> str:
    """What became of the rest, in a sentence or two."""
    ended = [each for each in others if each.state == "killed"]
    told = []
    if ended:
        after_s = (max(each.gone_ns for each in ended) - origin.gone_ns) / 1e9
        when = f" within {_seconds(after_s)}" if after_s > 0 else ""
        if all(each.cause.get("signal") in REQUESTS for each in ended):
            told.append(f"the launcher ended {several(e.who for e in ended)} after it{when}")
        else:
            names = several(e.who for e in ended)
            told.append(f"{names} went after it{when}, as a launcher ends the rest of a run")
    if lost := [each for each in others if manner(each) == "lost"]:
        its = "its connection" if len(lost) == 1 else "their connections"
        told.append(f"{several(e.who for e in lost)} lost {its} and failed")
    if asked := [each for each in others if manner(each) == "asked"]:
        was = "was" if len(asked) == 1 else "were"
        told.append(f"{several(e.who for e in asked)} {was} asked to end")
    rest = [each for each in others if manner(each) in ("own", "left")]
    told += [
        f"{several([each.who])} failed too: {because(each)[:_LONGEST_REASON]}"
        for each in rest[:_MOST_REASONS]
    ]
    if more := rest[_MOST_REASONS:]:
        told.append(f"{several(e.who for e in more)} failed too")
    return capital("; ".join(told))


def each_says(gone: Sequence[Gone]) -> str:
    shown = gone[:_MOST_REASONS]
    said = [f"{several([each.who])}: {because(each)[:_LONGEST_REASON]}" for each in shown]
    if more := len(gone) - len(shown):
        said.append(f"and {more} more")
    return "; ".join(said)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def named(who: Who) -> str:
    labels = dict(who)
    return f"{_rank(labels)} ({labels.get('node', '')})"


def _rank(labels: Mapping[str, str]) -> str:
    rank = labels.get("rank", "")
    # A process without a rank has `p` and its process id in its place.
    return f"process {rank[1:]}" if rank.startswith("p") else f"rank {rank}"


def several(whose: Iterable[Who]) -> str:
    labels = [dict(who) for who in sorted(whose, key=rank_key)]
    if len(labels) == 1:
        return _rank(labels[0])
    names = [each.get("rank", "") for each in labels]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
