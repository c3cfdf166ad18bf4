"""Deaths: which process of a run went without a word first, where it stood, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis.verdict import Change, Verdict, Who

# torchrun looks every 0.1 to 5 s, asks the others to end, and kills them 30 s later.
_FOLLOWS_S = 40.0
# An out-of-memory kill is the cause, even where giving back the memory delayed the end of it.
_KILL_TAKES_S = 2.0
_MOST_INCIDENTS = 8
_FULL = 0.8

_RUN_LABELS = ("group", "run", "job_type")

# How the loss of a peer sounds to those who were waiting for it.
_LOST_PEER = re.compile(
    r"peer|connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process"
    r"|socket|ncclremoteerror|heartbeat|store.*(timeout|timed out)|timed? ?out.*\d+ ?ms",
    re.IGNORECASE,
)
_CRASHES = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code gave up: look at the last lines that it printed",
}
# What a launcher, a scheduler or a terminal sends.
_REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")

Order = Literal["only", "time", "evidence", "unknown"]


class Gone(NamedTuple):
    """A process that is not there any more, as the agent saw it."""

    who: Who
    state: str
    """`killed` for one that went without a word, else `failed` or `finished`."""
    step: int | None
    phase: str
    phase_since_ns: int
    seen_alive_ns: int
    """When it was last seen at work, taken before its lock was looked at. For one that told its
    end, the moment that it told."""
    gone_ns: int
    """When it was first seen to be gone, taken after its lock was looked at: the death lies
    between the two, and nobody is said to be first on less. For one that told, as above."""
    reason: str = ""
    """What it said of its end, if it said anything."""
    cause: Mapping[str, Any] = {}
    """What `agent.causes` found."""


class _Incident:
    """Processes of a run that ended one because of the other, as far as can be known."""

    def __init__(self) -> None:
        self.members: dict[Who, Gone] = {}
        self.told: Verdict | None = None

    def takes(self, gone: Gone) -> bool:
        known = self.members.get(gone.who)
        if known is not None:
            return known.gone_ns == gone.gone_ns
        times = [member.gone_ns for member in self.members.values()]
        span = max(*times, gone.gone_ns) - min(*times, gone.gone_ns)
        return span <= _FOLLOWS_S * 1e9


class Deaths:
    """The deaths of one run on this node. An incident is one verdict, however many it took."""

    def __init__(self) -> None:
        self._incidents: list[_Incident] = []

    def gone(self, found: Sequence[Gone]) -> list[Change]:
        """Those whose end was seen at this look, all at once.

        Told of one again, with the same `gone_ns` and more in `cause`, it thinks again: what the
        kernel knows may come a moment after the death.
        """
        touched: list[_Incident] = []
        for each in found:
            if each.state == "finished" and not each.cause.get("exit_code"):
                continue
            incident = next((known for known in self._incidents if known.takes(each)), None)
            if incident is None:
                incident = _Incident()
                self._incidents = [incident, *self._incidents][:_MOST_INCIDENTS]
            incident.members[each.who] = each
            if incident not in touched:
                touched.append(incident)
        return [change for incident in touched for change in _changes(incident)]

    def alive(self, who: Who) -> list[Change]:
        """A process with these labels is at work: what ended the one before it is over."""
        changes = []
        for incident in [each for each in self._incidents if who in each.members]:
            self._incidents.remove(incident)
            if incident.told is not None:
                sentence = f"{_named(who)} is at work again: the run was started anew"
                changes.append(Change(incident.told._replace(sentence=sentence), False))
        return changes


def _changes(incident: _Incident) -> list[Change]:
    before, after = incident.told, _verdict(list(incident.members.values()))
    if before == after:
        return []
    incident.told = after
    changes = []
    if before is not None and (after is None or before.key != after.key):
        sentence = "it ended of its own accord" if after is None else after.sentence
        changes.append(Change(before._replace(sentence=sentence), False))
    if after is not None:
        changes.append(Change(after, True))
    return changes


# -- who was first


def _verdict(members: list[Gone]) -> Verdict | None:
    # Code 0 without a word: a program that leaves with os._exit when its work is done.
    members = [each for each in members if each.cause.get("exit_code") != 0]
    if not any(each.state == "killed" for each in members):
        return None
    members.sort(key=lambda each: (each.gone_ns, _rank_key(each.who)))
    first, order = _first(members)
    if order == "unknown":
        return _together(first, members)
    (origin,) = first
    others = [each for each in members if each is not origin]
    sentence = f"{_named(origin.who)} {_end(origin)}: {_because(origin)}{_hints(origin)}"
    if others:
        sentence += f". {_followed(origin, others)}"
    return Verdict(
        "death",
        origin.who,
        origin.phase,
        f"{sentence}.",
        _evidence(origin, order, members),
        origin.step,
        origin.gone_ns,
    )


def _first(members: list[Gone]) -> tuple[list[Gone], Order]:
    """Who went first, and what says so; several where nothing does."""
    if len(members) == 1:
        return members, "only"
    soonest = min(each.gone_ns for each in members)
    struck = [
        each
        for each in members
        if each.cause.get("out_of_memory") == "kernel log"
        and each.seen_alive_ns - soonest <= _KILL_TAKES_S * 1e9
    ]
    if len(struck) == 1:
        return struck, "evidence"
    # One was first if it was known to be gone while all others were still seen at work.
    early = [each for each in members if each.seen_alive_ns < soonest or each.gone_ns == soonest]
    if len(early) == 1:
        early += [each for each in members if _struck_alike(early[0], each)]
    if len(early) == 1:
        return early, "time"
    best = max(map(_guilt, early))
    guilty = [each for each in early if _guilt(each) == best]
    return (guilty, "evidence") if len(guilty) == 1 else (guilty, "unknown")


def _struck_alike(first: Gone, other: Gone) -> bool:
    """Whether one blow may have hit both, although one of them took longer to die.

    Somebody who kills all ranks sends the same signal to each; a launcher asks first, by another.
    """
    signal = first.cause.get("signal")
    return (
        other is not first
        and signal is not None
        and signal not in _REQUESTS
        and signal == other.cause.get("signal")
        and other.gone_ns - first.gone_ns <= _KILL_TAKES_S * 1e9
    )


def _guilt(gone: Gone) -> int:
    """How much speaks for a cause of its own, rather than for a consequence."""
    if gone.cause.get("out_of_memory") == "kernel log":
        return 4
    signal = gone.cause.get("signal")
    if gone.state == "killed" and signal is not None:
        return 0 if signal in _REQUESTS else 3
    if gone.state == "failed":
        return 0 if _LOST_PEER.search(gone.reason) else 2
    if gone.cause.get("exit_code"):
        return 2
    return 1


def _together(first: list[Gone], members: list[Gone]) -> Verdict:
    """Nobody can say who was first: it is about the run."""
    names = _several(each.who for each in first)
    within_s = (max(e.gone_ns for e in first) - min(e.seen_alive_ns for e in first)) / 1e9
    phases = {each.phase for each in first}
    steps = [each.step for each in first if each.step is not None]
    phase = phases.pop() if len(phases) == 1 else "mixed"
    where = f"in {phase}" if phase != "mixed" else "in different phases"
    at = f" at step {max(steps)}" if steps else ""
    sentence = (
        f"{names} ended at the same moment (within {_seconds(within_s)}), {where}{at}: "
        f"which was first cannot be told"
    )
    causes = {_because(each, sizes=False) for each in first}
    if len(causes) == 1:
        sentence += f"; each: {causes.pop()}"
    requests = {each.cause.get("signal") for each in first} <= set(_REQUESTS)
    if requests:
        sentence += ". Somebody asked all of them to end: a launcher, a scheduler, or a person"
    rest = [each for each in members if each not in first]
    if rest:
        sentence += f". {_followed(first[0], rest)}"
    return Verdict(
        "death",
        tuple(pair for pair in first[0].who if pair[0] in _RUN_LABELS),
        phase,
        f"{sentence}.",
        _evidence(None, "unknown", members),
        max(steps, default=None),
        min(each.gone_ns for each in first),
    )


# -- in words


def _end(gone: Gone) -> str:
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


def _because(gone: Gone, sizes: bool = True) -> str:
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
        return gone.reason or "it gave no reason"
    signal = cause.get("signal")
    if signal is not None:
        why = _CRASHES.get(signal, "")
        if signal in _REQUESTS:
            why = "somebody asked it to end: a launcher, a scheduler, or a person"
        return f"{signal}, {why}" if why else str(signal)
    if said := cause.get("launcher_error"):
        return str(said)
    if code := cause.get("exit_code"):
        return f"exit code {code}"
    return "by whom or what is not known here"


def _hints(gone: Gone) -> str:
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
    if gone.state == "failed" and _LOST_PEER.search(gone.reason):
        hints.append("the peer that it lost may be on another node")
    hints += [f"the GPU driver reported {text}" for text in cause.get("xid", ())]
    return "".join(f"; {hint}" for hint in hints)


def _followed(origin: Gone, others: list[Gone]) -> str:
    """What became of the rest, in a sentence or two."""
    ended = [each for each in others if each.state == "killed"]
    failed = [each for each in others if each.state != "killed"]
    told = []
    if ended:
        after_s = (max(each.gone_ns for each in ended) - origin.gone_ns) / 1e9
        when = f" within {_seconds(after_s)}" if after_s > 0 else ""
        if all(each.cause.get("signal") in _REQUESTS for each in ended):
            told.append(f"the launcher ended {_several(e.who for e in ended)} after it{when}")
        else:
            names = _several(e.who for e in ended)
            told.append(f"{names} went after it{when}, as a launcher ends the rest of a run")
    if failed:
        told.append(f"{_several(e.who for e in failed)} failed after it")
    text = "; ".join(told)
    return text[:1].upper() + text[1:]


def _evidence(origin: Gone | None, order: Order, members: list[Gone]) -> dict[str, Any]:
    start_ns = members[0].gone_ns if origin is None else origin.gone_ns
    return {
        "cause": "unknown" if origin is None else _cause_word(origin),
        "order_known_by": order,
        "ended": [
            {
                **{name: dict(each.who).get(name, "") for name in ("rank", "node")},
                "state": each.state,
                "step": each.step,
                "phase": each.phase,
                "seconds_after": round((each.gone_ns - start_ns) / 1e9, 3),
                "reason": each.reason,
                **each.cause,
            }
            for each in members
        ],
    }


def _cause_word(gone: Gone) -> str:
    if "out_of_memory" in gone.cause:
        return "out_of_memory"
    if gone.state == "failed":
        return "exception"
    if "signal" in gone.cause:
        return "signal"
    return "exit" if "exit_code" in gone.cause else "unknown"


def _named(who: Who) -> str:
    labels = dict(who)
    return f"{_rank(labels)} ({labels.get('node', '')})"


def _rank(labels: Mapping[str, str]) -> str:
    rank = labels.get("rank", "")
    # A process without a rank has `p` and its process id in its place.
    return f"process {rank[1:]}" if rank.startswith("p") else f"rank {rank}"


def _several(whose: Iterable[Who]) -> str:
    labels = [dict(who) for who in sorted(whose, key=_rank_key)]
    if len(labels) == 1:
        return _rank(labels[0])
    names = [each.get("rank", "") for each in labels]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _rank_key(who: Who) -> tuple[bool, int, str]:
    rank = dict(who).get("rank", "")
    return not rank.isdigit(), int(rank) if rank.isdigit() else 0, rank


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
