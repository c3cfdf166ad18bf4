"""Groups the ends of a run's processes into incidents, and finds the first end of each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from otel_ddp.diagnosis import say
from otel_ddp.diagnosis.death import cause
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, run_labels
from otel_ddp.vocabulary.words import TAKEN_BACK

_MOST_INCIDENTS = 8
_MOST_REASONS = 3
# If one rank raises, its peers lose their connections and may report their ends before it does. So,
# unless a process was killed, wait _OTHERS_REPORT_S for further reports before the verdict, or
# _CAUSE_COMES_S if no report states a cause of its own yet.
_OTHERS_REPORT_S = 0.5
_CAUSE_COMES_S = 2.0
# If some ranks seem to have finished, wait this long for their exit codes, which may show a
# failure. The launcher learns a code only when the interpreter has exited, which may take seconds.
_CODE_COMES_S = 6.0
# A killed process may take this long to disappear, as the kernel frees its memory first. Meanwhile
# other ranks may end because of the kill.
_KILL_TAKES_S = 2.0
# Ctrl-C reaches all ranks at once. Errors of ranks within this time may be consequences of Ctrl-C.
_INTERRUPT_TAKES_S = 1.0

_Order = Literal["only", "time", "evidence", "unknown"]


class _Incident:
    """Ends of processes that probably have one cause."""

    def __init__(self, stall: str) -> None:
        self.members: dict[Labels, EndedProcess] = {}
        self.verdict: Verdict | None = None
        # Duration and cause of a stall before the ends; empty if there was none.
        self.stall = stall
        # The names of nodes whose data no longer arrives ("silent").
        self.unheard: Sequence[str] = ()
        # When the run was restarted; 0 if it was not.
        self.restarted_ns = 0

    def includes(self, process: EndedProcess) -> bool:
        known = self.members.get(process.labels)
        if known is not None:
            return known.ended_ns == process.ended_ns
        if self.restarted_ns and process.ended_ns >= self.restarted_ns:
            return False
        worlds = {member.world_size for member in self.members.values()} - {None}
        if worlds and process.world_size is not None and process.world_size not in worlds:
            # Processes with different world sizes, such as an evaluator and a training rank, are
            # not connected, so the end of one does not cause the end of the other.
            return False
        times = [process.ended_ns, *(member.ended_ns for member in self.members.values())]
        return max(times) - min(times) <= cause.FOLLOWS_S * 1e9

    def update(self, finished: Sequence[EndedProcess]) -> Iterator[Change]:
        """Update the verdict on the incident. Yields the old verdict as closed if it was wrong, and
        the new or changed one as opened."""
        members, before = list(self.members.values()), self.verdict
        if before is None and not _is_ready(members, finished):
            return
        after = self.verdict = _verdict_of(members, finished, self)
        if before is not None and (after is None or before.key != after.key):
            evidence = {**before.evidence, TAKEN_BACK: True}
            sentence = _taken_back(before, after)
            yield Change(before._replace(sentence=sentence, evidence=evidence), False)
        if after is not None and after != before:
            yield Change(after, True)


class Deaths(Detector):
    """Judges the ends of one run's processes, with one verdict per incident."""

    def __init__(self) -> None:
        self._incidents: list[_Incident] = []
        self._ended: list[EndedProcess] = []
        self._finished: dict[Labels, EndedProcess] = {}
        self._changes: list[Change] = []

    def feed(self, rank: RankState, seen: Observation) -> None:
        # The same end is fed again when the kernel or the launcher reports more about it.
        if seen.ended is not None:
            self._ended.append(seen.ended)
            return
        self._finished.pop(rank.labels, None)
        for incident in self._incidents:
            # Compare rank numbers without the node: a restart may move a rank to another node.
            if incident.restarted_ns or _rank(rank.labels) not in map(_rank, incident.members):
                continue
            # Keep the incident after the restart: late or repeated reports of its ends still belong
            # to it, and must not open another one.
            incident.restarted_ns = max(rank.began_ns, 1)
            if incident.verdict is not None:
                who, before = say.capitalized(say.rank_name(rank.labels)), incident.verdict.sentence
                sentence = f"{before} {who} is at work again: the run was restarted."
                self._changes.append(Change(incident.verdict._replace(sentence=sentence), False))

    def poll(self, now_ns: int, stall: str = "", unheard: Collection[Labels] = ()) -> list[Change]:
        """Judge the ends since the last poll.

        *stall*: duration and cause of a stall before the ends; empty if there was none. *unheard*:
        silent nodes.
        """
        ended, self._ended = self._ended, []
        changes, self._changes = self._changes, []
        touched: dict[_Incident, None] = {}
        for each in ended:
            if each.state == "finished" and not each.cause.get("exit_code"):
                self._finished[each.labels] = each
                continue
            self._finished.pop(each.labels, None)
            # An end that is reported again belongs to its own incident, any other to the newest.
            found = [known for known in self._incidents if known.includes(each)]
            incident = next((e for e in found if each.labels in e.members), next(iter(found), None))
            if incident is None:
                incident = _Incident(stall)
                rest = sorted(self._incidents, key=lambda each: each.restarted_ns > 0)
                self._incidents = [incident, *rest][:_MOST_INCIDENTS]
            elif incident.restarted_ns:
                continue
            incident.members[each.labels] = each
            touched[incident] = None
        for incident in touched:
            incident.unheard = sorted(dict(node).get("node", "?") for node in unheard)
            changes += incident.update([*self._finished.values()])
        return changes


def _rank(labels: Labels) -> Labels:
    return tuple(pair for pair in labels if pair[0] in ("job_type", "rank"))


def _taken_back(before: Verdict, after: Verdict | None) -> str:
    """Why the verdict on an end was wrong, for the text that withdraws it."""
    if after is not None:
        return f"by now more is known: {after.sentence}"
    who = say.rank_name(before.labels) if "rank" in dict(before.labels) else "the run"
    return f"the end of {who} was intended"


def _is_ready(members: Sequence[EndedProcess], finished: Sequence[EndedProcess]) -> bool:
    """Whether to publish the verdict now; False while further reports may change it."""
    manners = set(map(cause.manner, members))
    if "killed" in manners:
        return True
    if any(each.world_size and each.world_size <= len(members) for each in members):
        return True  # no rank is left to report
    patience_s = _CAUSE_COMES_S
    if "own_cause" in manners or manners == {"exit_code", "lost_peer"}:
        patience_s = _OTHERS_REPORT_S
    elif any("exit_code" not in each.cause for each in finished):
        patience_s = _CODE_COMES_S
    return max(each.known_for_s for each in members) >= patience_s


# -- which was first


def _was_intended(members: list[EndedProcess]) -> bool:
    """Whether a person, a scheduler or the program ended the run. *members*: sorted by time."""
    manners = [cause.manner(each) for each in members]
    if "killed" in manners:
        return False
    # A launcher asks the ranks to end only after one has failed. So if a request came before any
    # failure, a person or a scheduler ended the run.
    if next((each for each in manners if each != "lost_peer"), None) == "requested":
        return True
    # Launchers do not send SIGINT on their own, so a KeyboardInterrupt on one rank means that
    # Ctrl-C reached all ranks. Another rank may have failed because of Ctrl-C, say in its data
    # loader, before it could report the interrupt.
    soonest_ns = members[0].ended_ns
    if any(
        each.reason.startswith("KeyboardInterrupt")
        and each.ended_ns - soonest_ns <= _INTERRUPT_TAKES_S * 1e9
        for each in members
    ):
        return True
    if set(manners) != {"exit_code"}:
        return False
    # If several ranks ended with nothing but an exit code, the program meant to end: many programs
    # exit with 1 when a scheduler asks them to end. But if only one of several ranks reported
    # "failed", it did fail.
    return len(members) > 1 or members[0].state == "finished" or members[0].world_size == 1


def _first_ended(members: list[EndedProcess]) -> tuple[list[EndedProcess], _Order]:
    """The process that ended first, or all that may have been first; and how this is known."""
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
    # A rank that raises closes its connections at once, but reports its end only when it exits,
    # maybe seconds later, after peers have reported a lost connection. So if any rank has a cause
    # of its own or an exit code, ranks that lost a peer did not end first.
    reasons = {cause.manner(each) for each in members} & {"own_cause", "exit_code"}
    causes = [each for each in members if not (reasons and cause.manner(each) == "lost_peer")]
    soonest = min(each.ended_ns for each in causes)
    # A process was first if it had ended while all others were still alive.
    early = [each for each in causes if each.seen_alive_ns < soonest or each.ended_ns == soonest]
    later = [each for each in causes if each not in early]
    early += [each for each in later if any(_may_share_cause(first, each) for first in early)]
    if len(early) == 1:
        earlier = any(each.ended_ns < early[0].seen_alive_ns for each in members)
        return early, "evidence" if earlier else "time"
    best = max(map(cause.guilt, early))
    guilty = [each for each in early if cause.guilt(each) == best]
    return (guilty, "evidence") if len(guilty) == 1 else (guilty, "unknown")


def _requested_alone(members: list[EndedProcess]) -> EndedProcess | None:
    """The only signalled process, if it ended first and all others lost their connections to it.

    A launcher signals ranks only after one has ended, so something else signalled this process.
    """
    # Only processes that did not report their end count: a process that reported it may have been
    # signalled by the launcher afterwards.
    requested = [
        each
        for each in members
        if each.state == "killed" and each.cause.get("signal") in cause.REQUESTS
    ]
    if len(requested) != 1 or len(members) == 1:
        return None
    (one,) = requested
    rest = [each for each in members if each is not one]
    outlived = all(each.last_present_ns > one.ended_ns for each in rest)
    return one if outlived and {cause.manner(each) for each in rest} == {"lost_peer"} else None


def _may_share_cause(first: EndedProcess, other: EndedProcess) -> bool:
    """Whether one cause may have ended both, although at different times.

    A person or a launcher sends the same signal to all ranks, and some take longer to end. Ranks
    that report the same reason failed by the same code or data, not because of each other.
    """
    if (
        other is not first
        and cause.manner(first) == cause.manner(other)
        and cause.manner(first) != "killed"
    ):
        return _without_numbers(first) == _without_numbers(other)
    signal = first.cause.get("signal")
    return (
        other is not first
        and signal is not None
        and signal == other.cause.get("signal")
        and other.ended_ns - first.ended_ns <= _KILL_TAKES_S * 1e9
    )


def _without_numbers(process: EndedProcess) -> str:
    """The cause of an end without numbers, which differ by rank: shards, devices, addresses."""
    return re.sub(r"0x[0-9a-fA-F]+|[\d.]+", "0", cause.why_it_ended(process))


# -- the verdict


def _verdict_of(
    members: list[EndedProcess],
    finished: Sequence[EndedProcess],
    incident: _Incident,
) -> Verdict | None:
    """The verdict on an incident; None if nothing has failed."""
    # A program that calls os._exit when it is done leaves no report, but exit code 0. It has not
    # failed, so leave it out.
    left = [each for each in members if each.state != "failed" and each.cause.get("exit_code") == 0]
    members = [each for each in members if each not in left]
    members.sort(key=lambda each: (each.ended_ns, say.rank_order(each.labels)))
    if not members or _was_intended(members):
        return None
    first, order = _first_ended(members)
    if not any(map(cause.guilt, first)) and "lost_peer" in map(cause.manner, first):
        # Some ranks lost a peer, and the launcher ended the others, so none of them is the cause.
        first, order = [each for each in members if cause.manner(each) == "lost_peer"], "unknown"
        names, word = say.rank_list(each.labels for each in first), "lost_peer"
        sentence = f"{names} failed {_where(first)}, because of lost connections: {_causes(first)}"
        sentence += f". {_other_end(first, [*finished, *left], incident.unheard)}"
    elif order == "unknown":
        sentence, word = _together(first)
    else:
        (origin,) = first
        sentence = f"{say.rank_name(origin.labels)} {cause.how_it_ended(origin)}"
        sentence += f": {cause.short_cause(origin)}"
        word = cause.cause_word(origin)
    if rest := [each for each in members if each not in first]:
        sentence += f". {_what_followed(first, rest)}"
    if incident.stall:
        sentence += f". Before that, no rank had moved {incident.stall}"
    phases = {each.phase for each in first}
    start_ns = members[0].ended_ns if order == "unknown" else first[0].ended_ns
    evidence = {
        "cause": word,
        "order_known_by": order,
        "ended": [
            {
                **{name: dict(each.labels).get(name, "") for name in ("rank", "node")},
                "state": each.state,
                "step": each.step,
                "phase": each.phase,
                "seconds_after": round((each.ended_ns - start_ns) / 1e9, 3),
                "reason": each.reason,
                **each.cause,
            }
            for each in members
        ],
    }
    return Verdict(
        "death",
        run_labels(first[0].labels) if order == "unknown" else first[0].labels,
        phases.pop() if len(phases) == 1 else "mixed",
        f"{sentence}.",
        evidence,
        max((each.step for each in first if each.step is not None), default=None),
        min(each.ended_ns for each in first),
    )


def _together(first: Sequence[EndedProcess]) -> tuple[str, str]:
    """Sentence and cause of ends whose order is unknown."""
    soonest_ns = min(each.seen_alive_ns for each in first)
    within = say.duration((max(each.ended_ns for each in first) - soonest_ns) / 1e9)
    sentence = (
        f"{say.rank_list(each.labels for each in first)} ended within {within} of each other, "
        f"{_where(first)}, and which was first is not known: {_causes(first)}"
    )
    words = {cause.cause_word(each) for each in first}
    reported = all(each.state != "killed" for each in first)
    return sentence, words.pop() if reported and len(words) == 1 else "unknown"


def _other_end(
    lost: Sequence[EndedProcess], finished: Sequence[EndedProcess], unheard: Sequence[str]
) -> str:
    """A sentence on the lost peer: on a silent node, among the finished ranks, or unknown."""
    if unheard:
        are, there = say.verb(unheard, "is", "are"), say.verb(unheard, "it is", "they are")
        return f"{', '.join(unheard)} {are} no longer heard: look whether {there} still there"
    soonest, latest = min(e.ended_ns for e in lost), max(e.ended_ns for e in lost)
    world = max((each.world_size or 0 for each in lost), default=0)
    # The ranks that finished near the time of the lost connections. Evaluators have another world
    # size and are not connected to the training, so they are left out.
    left = [
        each
        for each in finished
        if each.world_size in (None, world)
        and soonest - cause.FOLLOWS_S * 1e9 <= each.ended_ns
        and each.seen_alive_ns <= latest
    ]
    if left:
        has = say.verb(left, "has", "have")
        text = f"{say.rank_list(e.labels for e in left)} {has} finished before that"
        if any("exit_code" not in e.cause for e in left):
            text += ", with an exit code that is not known"
        return say.capitalized(text)
    return "No rank reports another cause: look at other nodes, and at the network"


def _where(processes: Sequence[EndedProcess]) -> str:
    """The phase and step in which these processes ended."""
    phases = {each.phase for each in processes}
    steps = [each.step for each in processes if each.step is not None]
    where = say.in_phase(phases.pop()) if len(phases) == 1 else "in different phases"
    return f"{where} after step {max(steps)}" if steps else where


def _what_followed(first: Sequence[EndedProcess], others: list[EndedProcess]) -> str:
    """A sentence or two on the ends of the other ranks."""
    parts = []
    if killed := [each for each in others if each.state == "killed"]:
        after_s = (max(each.ended_ns for each in killed) - first[0].ended_ns) / 1e9
        when = f" within {say.duration(after_s)}" if after_s > 0 else ""
        parts.append(f"{say.rank_list(e.labels for e in killed)} followed{when}")
    if lost := [each for each in others if cause.manner(each) == "lost_peer"]:
        its = say.verb(lost, "its connection", "their connections")
        parts.append(f"{say.rank_list(e.labels for e in lost)} lost {its} and failed")
    if requested := [each for each in others if cause.manner(each) == "requested"]:
        was = say.verb(requested, "was", "were")
        parts.append(f"{say.rank_list(e.labels for e in requested)} {was} asked to end")
    rest = [each for each in others if cause.manner(each) in ("own_cause", "exit_code")]
    parts += [
        f"{say.rank_list([each.labels])} failed too: {cause.short_cause(each)}"
        for each in rest[:_MOST_REASONS]
    ]
    if more := rest[_MOST_REASONS:]:
        parts.append(f"{say.rank_list(e.labels for e in more)} failed too")
    return say.capitalized("; ".join(parts))


def _causes(processes: Sequence[EndedProcess]) -> str:
    """The common cause, or the causes of the first few ranks."""
    if len(set(map(cause.short_cause, processes))) == 1:
        return cause.short_cause(processes[0])
    shown = processes[:_MOST_REASONS]
    parts = [f"{say.rank_list([each.labels])}: {cause.short_cause(each)}" for each in shown]
    if more := len(processes) - len(shown):
        parts.append(f"and {more} more")
    return "; ".join(parts)
