"""Deaths and failures: which process of a run ended first, where it stood, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis.verdict import Change, Verdict, Who

# torchrun looks every 0.1 to 5 s, asks the others to end, and kills them 30 s later.
_FOLLOWS_S = 40.0
# An out-of-memory kill is the cause, even where giving back the memory delayed the end of it.
_KILL_TAKES_S = 2.0
_MOST_INCIDENTS = 8
# One that raises may tell it after the one that lost it, and all may raise the same: where nobody
# was killed the first word is waited with for a moment, longer where it says nothing of a cause.
_OTHERS_TELL_S = 0.5
_CAUSE_COMES_S = 2.0
# Python may take seconds to leave after its last word, and the exit code comes after that.
_CODE_COMES_S = 6.0
_FALLS_S = 1.0
_MOST_REASONS = 3
_LONGEST_REASON = 200
_FULL = 0.8

_RUN_LABELS = ("group", "run", "job_type")

# How the loss of a peer sounds to those who were waiting for it. "Peer access" is what two GPUs
# have of one another, or lack.
_LOST_PEER = re.compile(
    r"\bpeer\b(?! access)|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|remote process|socket|ncclremoteerror|heartbeat|store.*(timeout|timed out)"
    r"|timed? ?out.*\d+ ?(ms|milliseconds)",
    re.IGNORECASE,
)
# How it sounds when a person or a scheduler ended it: Ctrl-C, what libraries raise from their
# handlers of signals, and the codes that a shell gives to them: 128 and the signal's number.
_ASKED = re.compile(
    r"(KeyboardInterrupt|SignalException|SIGTERMException)\b|SystemExit: (129|130|143)$"
    r"|.*\b(got|received|caught)( signal:?)? (SIG(TERM|INT|HUP)|Signals\.SIG(TERM|INT|HUP))\b"
)
_ASKED_CODES = (129, 130, 143)
# It left by itself, and said no more than a number: `sys.exit(1)`.
_LEFT = re.compile(r"SystemExit: \d+$")
_CRASHES = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code gave up: look at the last lines that it printed",
}
# What a launcher, a scheduler or a terminal sends.
_REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")

_REQUESTED = "somebody asked it to end: a launcher, a scheduler, or a person"

Order = Literal["only", "time", "evidence", "unknown"]
Manner = Literal["killed", "asked", "lost", "left", "own"]
"""How it ended: without a word; asked to; as it lost a connection; by an exit code alone;
for a reason of its own."""


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
    world_size: int | None = None
    """How many ranks the run has, on all nodes."""
    waited_s: float = 0.0
    """How long ago its end was first seen: by now others have told theirs, and its launcher has
    looked."""


class _Around(NamedTuple):
    """What else is known of the run on this node."""

    finished: Sequence[Gone]
    at_work: Collection[Who] | None
    """None where nobody said who is."""


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
    """The ends of one run on this node. An incident is one verdict, however many it took."""

    def __init__(self) -> None:
        self._incidents: list[_Incident] = []
        self._finished: dict[Who, Gone] = {}

    def gone(self, found: Sequence[Gone], at_work: Collection[Who] | None = None) -> list[Change]:
        """Those whose end was seen at this look, all at once; *at_work*: who of the run is left.

        Told of one again, with the same `gone_ns` and more in `cause`, it thinks again: what the
        kernel knows may come a moment after the death.
        """
        touched: list[_Incident] = []
        for each in found:
            if each.state == "finished" and not each.cause.get("exit_code"):
                self._finished[each.who] = each
                continue
            self._finished.pop(each.who, None)
            incident = next((known for known in self._incidents if known.takes(each)), None)
            if incident is None:
                incident = _Incident()
                self._incidents = [incident, *self._incidents][:_MOST_INCIDENTS]
            incident.members[each.who] = each
            if incident not in touched:
                touched.append(incident)
        around = _Around(list(self._finished.values()), at_work)
        return [change for incident in touched for change in _changes(incident, around)]

    def alive(self, who: Who) -> list[Change]:
        """A process with these labels is at work: what ended the one before it is over."""
        changes = []
        self._finished.pop(who, None)
        for incident in [each for each in self._incidents if who in each.members]:
            self._incidents.remove(incident)
            if incident.told is not None:
                sentence = f"{_named(who)} is at work again: the run was started anew"
                changes.append(Change(incident.told._replace(sentence=sentence), False))
        return changes


def _changes(incident: _Incident, around: _Around) -> list[Change]:
    members = list(incident.members.values())
    before = incident.told
    if before is None and not _all_told(members, around):
        return []
    after = _verdict(members, around)
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


def _all_told(members: list[Gone], around: _Around) -> bool:
    """Whether a verdict is worth its breath yet, or the next look may turn it over."""
    manners = set(map(_manner, members))
    if "killed" in manners:
        return True  # the kernel says more of it later, and nobody is waited for
    if any(each.world_size and each.world_size <= len(members) for each in members):
        return True  # nobody is left who may have something to say
    patience_s = _CAUSE_COMES_S
    if "own" in manners or manners == {"left", "lost"}:
        patience_s = _OTHERS_TELL_S
    elif any("exit_code" not in each.cause for each in around.finished):
        patience_s = _CODE_COMES_S
    return max(each.waited_s for each in members) >= patience_s


def _manner(gone: Gone) -> Manner:
    if gone.state == "killed":
        return "killed"
    if gone.state == "finished":
        if "launcher_error" in gone.cause:
            return "own"
        return "asked" if gone.cause.get("exit_code") in _ASKED_CODES else "left"
    if _ASKED.match(gone.reason):
        return "asked"
    if _LEFT.match(gone.reason):
        return "left"
    # A run of one has no peers: whatever it lost was something else.
    return "lost" if gone.world_size != 1 and _LOST_PEER.search(gone.reason) else "own"


def _of_their_own_will(members: list[Gone]) -> bool:
    """Whether somebody, or the program itself, ended the run: that is nobody's death."""
    manners = [_manner(each) for each in members]
    if "killed" in manners:
        return False
    # A launcher asks the others once one has failed; here somebody asked before anyone had.
    if next((manner for manner in manners if manner != "lost"), None) == "asked":
        return True
    # No launcher sends SIGINT of its own accord: all of them had it, and one was faster to fall
    # over it, in a data loader say, than to tell it.
    soonest_ns = members[0].gone_ns
    if any(
        each.reason.startswith("KeyboardInterrupt") and each.gone_ns - soonest_ns <= _FALLS_S * 1e9
        for each in members
    ):
        return True
    if set(manners) != {"left"}:
        return False
    # One that leaves takes others along; where all do, or nobody minds, the program meant it: many
    # leave with 1 when a scheduler asks them to. One that said "failed" alone is taken at its word.
    return len(members) > 1 or members[0].state == "finished" or members[0].world_size == 1


# -- who was first


def _verdict(members: list[Gone], around: _Around) -> Verdict | None:
    # Code 0 without a word: a program that leaves with os._exit when its work is done.
    members = [
        each for each in members if each.state == "failed" or each.cause.get("exit_code") != 0
    ]
    members.sort(key=lambda each: (each.gone_ns, _rank_key(each.who)))
    if not members or _of_their_own_will(members):
        return None
    first, order = _first(members)
    if not any(map(_guilt, first)) and "lost" in map(_manner, first):
        # Some lost a peer and a launcher ended the others: what did it is not among them.
        return _severed(members, around)
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
    # One that raises closes its connections first and tells it when it leaves, seconds later
    # perhaps: of those who tell, one that lost a peer comes after one with another reason.
    reasons = {_manner(each) for each in members} & {"own", "left"}
    causes = [each for each in members if not (reasons and _manner(each) == "lost")]
    soonest = min(each.gone_ns for each in causes)
    # One was first if it was known to be gone while all others were still seen at work.
    early = [each for each in causes if each.seen_alive_ns < soonest or each.gone_ns == soonest]
    if len(early) == 1:
        early += [each for each in causes if _struck_alike(early[0], each)]
    if len(early) == 1:
        before = any(each.gone_ns < early[0].seen_alive_ns for each in members)
        return early, "evidence" if before else "time"
    best = max(map(_guilt, early))
    guilty = [each for each in early if _guilt(each) == best]
    return (guilty, "evidence") if len(guilty) == 1 else (guilty, "unknown")


def _struck_alike(first: Gone, other: Gone) -> bool:
    """Whether one blow may have hit both, although one of them took longer to die.

    Somebody who kills all ranks sends the same signal to each; a launcher asks first, by another.
    And who tells the same of itself was hit by the same code or data, not by the other's end.
    """
    if other is not first and _manner(first) == _manner(other) and _manner(first) != "killed":
        return _alike(first) == _alike(other)
    signal = first.cause.get("signal")
    return (
        other is not first
        and signal is not None
        and signal not in _REQUESTS
        and signal == other.cause.get("signal")
        and other.gone_ns - first.gone_ns <= _KILL_TAKES_S * 1e9
    )


def _alike(gone: Gone) -> str:
    """Its reason, less what differs from rank to rank: numbers of shards, devices, addresses."""
    return re.sub(r"0x[0-9a-fA-F]+|[\d.]+", "0", _because(gone))


def _guilt(gone: Gone) -> int:
    """How much speaks for a cause of its own, rather than for a consequence."""
    if gone.cause.get("out_of_memory") == "kernel log":
        return 4
    signal = gone.cause.get("signal")
    if gone.state == "killed" and signal is not None:
        return 0 if signal in _REQUESTS else 3
    if gone.state != "killed":
        return 2 if _manner(gone) in ("own", "left") else 0
    return 2 if gone.cause.get("exit_code") else 1


def _together(first: list[Gone], members: list[Gone]) -> Verdict:
    """Nobody can say who was first: it is about the run."""
    told = all(each.state != "killed" for each in first)
    when = (
        f"failed within {_within(first)} of one another"
        if told
        else f"ended at the same moment (within {_within(first)})"
    )
    sentence = (
        f"{_several(each.who for each in first)} {when}, {_where(first)}: "
        "which was first cannot be told"
    )
    causes = [_because(each, sizes=False) for each in first]
    if len(set(causes)) == 1:
        sentence += f"; each: {causes[0]}"
    elif told:
        sentence += f"; {_each_says(first)}"
    requests = {each.cause.get("signal") for each in first} <= set(_REQUESTS)
    if requests:
        sentence += ". Somebody asked all of them to end: a launcher, a scheduler, or a person"
    rest = [each for each in members if each not in first]
    if rest:
        sentence += f". {_followed(first[0], rest)}"
    words = {_cause_word(each) for each in first}
    cause = words.pop() if told and len(words) == 1 else "unknown"
    return _about_the_run(f"{sentence}.", first, members, cause)


def _severed(members: list[Gone], around: _Around) -> Verdict:
    """They lost connections, and nobody who ended here says why the other end went."""
    lost = [each for each in members if _manner(each) == "lost"]
    if len(lost) == 1:
        sentence = f"{_named(lost[0].who)} {_end(lost[0])}, as it lost a connection"
    else:
        names = _several(each.who for each in lost)
        sentence = (
            f"{names} failed within {_within(lost)}, {_where(lost)}, as they lost connections"
        )
    if len(set(map(_alike, lost))) == 1:
        sentence += f": {lost[0].reason}"
    else:
        sentence += f": {_each_says(lost)}"
    sentence += f". {_whence(lost, members, around)}"
    if rest := [each for each in members if each not in lost]:
        sentence += f". {_followed(lost[0], rest)}"
    return _about_the_run(f"{sentence}.", lost, members, "lost_peer")


def _whence(lost: list[Gone], members: list[Gone], around: _Around) -> str:
    """Where the peer may be that they lost, as far as can be said."""
    soonest, latest = min(e.gone_ns for e in lost), max(e.gone_ns for e in lost)
    left = [e for e in around.finished if soonest - _FOLLOWS_S * 1e9 <= e.gone_ns <= latest]
    if left:
        verb = "has" if len(left) == 1 else "have"
        told = f"{_several(e.who for e in left)} {verb} finished before that"
        if any("exit_code" not in e.cause for e in left):
            told += ", with an exit code that is not known"
        return _capital(told)
    at_work = around.at_work or ()
    here = {*at_work, *(each.who for each in (*members, *around.finished))}
    if not any(each.world_size and each.world_size <= len(here) for each in members):
        if around.at_work is not None and not at_work and any(e.world_size for e in members):
            return "No rank here tells another cause: it is on another node, or in the network"
        return "The other end may be on another node: look there"
    if at_work:
        verb = "is" if len(at_work) == 1 else "are"
        return f"No other node has a part in it, and {_several(at_work)} {verb} still there"
    return "No other node has a part in it, and nobody here tells another cause"


def _about_the_run(sentence: str, first: list[Gone], members: list[Gone], cause: str) -> Verdict:
    phases = {each.phase for each in first}
    return Verdict(
        "death",
        tuple(pair for pair in first[0].who if pair[0] in _RUN_LABELS),
        phases.pop() if len(phases) == 1 else "mixed",
        sentence,
        {**_evidence(None, "unknown", members), "cause": cause},
        max((each.step for each in first if each.step is not None), default=None),
        min(each.gone_ns for each in first),
    )


# -- in words


def _within(several: Sequence[Gone]) -> str:
    """How far apart their ends may be."""
    soonest_ns = min(each.seen_alive_ns for each in several)
    return _seconds((max(each.gone_ns for each in several) - soonest_ns) / 1e9)


def _where(several: Sequence[Gone]) -> str:
    phases = {each.phase for each in several}
    steps = [each.step for each in several if each.step is not None]
    where = f"in {phases.pop()}" if len(phases) == 1 else "in different phases"
    return f"{where} at step {max(steps)}" if steps else where


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
        reason = gone.reason or "it gave no reason"
        return f"{reason}, {_REQUESTED}" if _manner(gone) == "asked" else reason
    signal = cause.get("signal")
    if signal is not None:
        why = _CRASHES.get(signal, "")
        if signal in _REQUESTS:
            why = _REQUESTED
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
    hints += [f"the GPU driver reported {text}" for text in cause.get("xid", ())]
    return "".join(f"; {hint}" for hint in hints)


def _followed(origin: Gone, others: list[Gone]) -> str:
    """What became of the rest, in a sentence or two."""
    ended = [each for each in others if each.state == "killed"]
    told = []
    if ended:
        after_s = (max(each.gone_ns for each in ended) - origin.gone_ns) / 1e9
        when = f" within {_seconds(after_s)}" if after_s > 0 else ""
        if all(each.cause.get("signal") in _REQUESTS for each in ended):
            told.append(f"the launcher ended {_several(e.who for e in ended)} after it{when}")
        else:
            names = _several(e.who for e in ended)
            told.append(f"{names} went after it{when}, as a launcher ends the rest of a run")
    if lost := [each for each in others if _manner(each) == "lost"]:
        its = "its connection" if len(lost) == 1 else "their connections"
        told.append(f"{_several(e.who for e in lost)} lost {its} and failed")
    if asked := [each for each in others if _manner(each) == "asked"]:
        was = "was" if len(asked) == 1 else "were"
        told.append(f"{_several(e.who for e in asked)} {was} asked to end")
    rest = [each for each in others if _manner(each) in ("own", "left")]
    told += [
        f"{_several([each.who])} failed too: {_because(each)[:_LONGEST_REASON]}"
        for each in rest[:_MOST_REASONS]
    ]
    if more := rest[_MOST_REASONS:]:
        told.append(f"{_several(e.who for e in more)} failed too")
    return _capital("; ".join(told))


def _each_says(several: Sequence[Gone]) -> str:
    shown = several[:_MOST_REASONS]
    said = [f"{_several([each.who])}: {_because(each)[:_LONGEST_REASON]}" for each in shown]
    if more := len(several) - len(shown):
        said.append(f"and {more} more")
    return "; ".join(said)


def _capital(text: str) -> str:
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
    manner = _manner(gone)
    if manner == "own" or manner == "lost":
        return "exception"
    if manner == "left":
        return "exit"
    if manner == "asked" or "signal" in gone.cause:
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
