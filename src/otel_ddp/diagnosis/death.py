"""Deaths and failures: which process of a run ended first, where it stood, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis import death_words as say
from otel_ddp.diagnosis.ends import REQUESTS, Gone, cause_word, manner, rank_key
from otel_ddp.diagnosis.facts import run_of
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

Order = Literal["only", "time", "evidence", "unknown"]


class _Around(NamedTuple):
    """What else is known of the run on this node."""

    finished: Sequence[Gone]
    at_work: Collection[Who] | None
    """Of those that train together. None where that was not said."""


class _Incident:
    """Processes of a run that ended one because of the other, as far as can be known."""

    def __init__(self) -> None:
        self.members: dict[Who, Gone] = {}
        self.told: Verdict | None = None

    def takes(self, gone: Gone) -> bool:
        known = self.members.get(gone.who)
        if known is not None:
            return known.gone_ns == gone.gone_ns
        worlds = {member.world_size for member in self.members.values()} - {None}
        if worlds and gone.world_size is not None and gone.world_size not in worlds:
            # An evaluator beside the training: neither loses a peer with the other.
            return False
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
                sentence = f"{say.named(who)} is at work again: the run was started anew"
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
    manners = set(map(manner, members))
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


def _of_their_own_will(members: list[Gone]) -> bool:
    """Whether somebody, or the program itself, ended the run: that is nobody's death."""
    manners = [manner(each) for each in members]
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
    members.sort(key=lambda each: (each.gone_ns, rank_key(each.who)))
    if not members or _of_their_own_will(members):
        return None
    first, order = _first(members)
    if not any(map(_guilt, first)) and "lost" in map(manner, first):
        # Some lost a peer and a launcher ended the others: what did it is not among them.
        return _severed(members, around)
    if order == "unknown":
        return _together(first, members)
    (origin,) = first
    others = [each for each in members if each is not origin]
    why = f"{say.because(origin)}{say.hints(origin)}"
    sentence = f"{say.named(origin.who)} {say.end(origin)}: {why}"
    if others:
        sentence += f". {say.followed(origin, others)}"
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
    if (asked := _asked_alone(members)) is not None:
        return [asked], "evidence"
    # One that raises closes its connections first and tells it when it leaves, seconds later
    # perhaps: of those who tell, one that lost a peer comes after one with another reason.
    reasons = {manner(each) for each in members} & {"own", "left"}
    causes = [each for each in members if not (reasons and manner(each) == "lost")]
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


def _asked_alone(members: list[Gone]) -> Gone | None:
    """The one that was asked to end while all others were there, which then lost it.

    A launcher asks the others once one has left: this one was asked by something else.
    """
    # One that has told its end may be hurried by the launcher, and that is not what ended it.
    asked = [
        each for each in members if each.state == "killed" and each.cause.get("signal") in REQUESTS
    ]
    if len(asked) != 1 or len(members) == 1:
        return None
    (one,) = asked
    rest = [each for each in members if each is not one]
    outlived = all(each.present_ns > one.gone_ns for each in rest)
    return one if outlived and {manner(each) for each in rest} == {"lost"} else None


def _struck_alike(first: Gone, other: Gone) -> bool:
    """Whether one blow may have hit both, although one of them took longer to die.

    Somebody who ends all ranks sends the same signal to each, and so does a launcher that was asked
    to end: some take a moment longer. Of one that alone was asked, nobody can tell that.
    And who tells the same of itself was hit by the same code or data, not by the other's end.
    """
    if other is not first and manner(first) == manner(other) and manner(first) != "killed":
        return _alike(first) == _alike(other)
    signal = first.cause.get("signal")
    return (
        other is not first
        and signal is not None
        and signal == other.cause.get("signal")
        and other.gone_ns - first.gone_ns <= _KILL_TAKES_S * 1e9
    )


def _alike(gone: Gone) -> str:
    """Its reason, less what differs from rank to rank: numbers of shards, devices, addresses."""
    return re.sub(r"0x[0-9a-fA-F]+|[\d.]+", "0", say.because(gone))


def _guilt(gone: Gone) -> int:
    """How much speaks for a cause of its own, rather than for a consequence."""
    if gone.cause.get("out_of_memory") == "kernel log":
        return 4
    signal = gone.cause.get("signal")
    if gone.state == "killed" and signal is not None:
        return 0 if signal in REQUESTS else 3
    if gone.state != "killed":
        return 2 if manner(gone) in ("own", "left") else 0
    return 2 if gone.cause.get("exit_code") else 1


def _together(first: list[Gone], members: list[Gone]) -> Verdict:
    """Nobody can say who was first: it is about the run."""
    told = all(each.state != "killed" for each in first)
    when = (
        f"failed within {say.within(first)} of one another"
        if told
        else f"ended at the same moment (within {say.within(first)})"
    )
    sentence = (
        f"{say.several(each.who for each in first)} {when}, {say.where(first)}: "
        "which was first cannot be told"
    )
    causes = [say.because(each, sizes=False) for each in first]
    if len(set(causes)) == 1:
        sentence += f"; each: {causes[0]}"
    elif told:
        sentence += f"; {say.each_says(first)}"
    requests = {each.cause.get("signal") for each in first} <= set(REQUESTS)
    if requests:
        sentence += ". Somebody asked all of them to end: a launcher, a scheduler, or a person"
    rest = [each for each in members if each not in first]
    if rest:
        sentence += f". {say.followed(first[0], rest)}"
    words = {cause_word(each) for each in first}
    cause = words.pop() if told and len(words) == 1 else "unknown"
    return _about_the_run(f"{sentence}.", first, members, cause)


def _severed(members: list[Gone], around: _Around) -> Verdict:
    """They lost connections, and nobody who ended here says why the other end went."""
    lost = [each for each in members if manner(each) == "lost"]
    if len(lost) == 1:
        sentence = f"{say.named(lost[0].who)} {say.end(lost[0])}, as it lost a connection"
    else:
        names = say.several(each.who for each in lost)
        when = f"within {say.within(lost)}, {say.where(lost)}"
        sentence = f"{names} failed {when}, as they lost connections"
    if len(set(map(_alike, lost))) == 1:
        sentence += f": {lost[0].reason}"
    else:
        sentence += f": {say.each_says(lost)}"
    sentence += f". {_whence(lost, members, around)}"
    if rest := [each for each in members if each not in lost]:
        sentence += f". {say.followed(lost[0], rest)}"
    return _about_the_run(f"{sentence}.", lost, members, "lost_peer")


def _whence(lost: list[Gone], members: list[Gone], around: _Around) -> str:
    """Where the peer may be that they lost, as far as can be said."""
    soonest, latest = min(e.gone_ns for e in lost), max(e.gone_ns for e in lost)
    world = max((each.world_size or 0 for each in lost), default=0)
    # Not an evaluator that ended as well: it has a world of its own.
    finished = [each for each in around.finished if each.world_size in (None, world)]
    left = [each for each in finished if soonest - _FOLLOWS_S * 1e9 <= each.gone_ns <= latest]
    if left:
        verb = "has" if len(left) == 1 else "have"
        told = f"{say.several(e.who for e in left)} {verb} finished before that"
        if any("exit_code" not in e.cause for e in left):
            told += ", with an exit code that is not known"
        return say.capital(told)
    at_work = around.at_work or ()
    ended = [each.who for each in (*members, *finished)]
    if not 0 < world <= len({*at_work, *ended}):
        if around.at_work is not None and not at_work and world:
            return "No rank here tells another cause: it is on another node, or in the network"
        return "The other end may be on another node: look there"
    if at_work:
        verb = "is" if len(at_work) == 1 else "are"
        return f"No other node has a part in it, and {say.several(at_work)} {verb} still there"
    return "No other node has a part in it, and nobody here tells another cause"


def _about_the_run(sentence: str, first: list[Gone], members: list[Gone], cause: str) -> Verdict:
    phases = {each.phase for each in first}
    return Verdict(
        "death",
        run_of(first[0].who),
        phases.pop() if len(phases) == 1 else "mixed",
        sentence,
        {**_evidence(None, "unknown", members), "cause": cause},
        max((each.step for each in first if each.step is not None), default=None),
        min(each.gone_ns for each in first),
    )


def _evidence(origin: Gone | None, order: Order, members: list[Gone]) -> dict[str, Any]:
    start_ns = members[0].gone_ns if origin is None else origin.gone_ns
    return {
        "cause": "unknown" if origin is None else cause_word(origin),
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
