"""Accounts for the time of a run's ranks: productive time, and time lost by cause.

From the start of a rank's first process, each of its seconds is counted for exactly one cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.agent.history.attempts import Attempts, Placed
from otel_ddp.diagnosis.steps import Step
from otel_ddp.history.newest_attempt import worst_state
from otel_ddp.vocabulary.words import PHASE_CODE, TIME_CAUSES, is_taken_back, phase_word

_S = 1_000_000_000
_LATE = frozenset({"straggler", "imbalance"})
# The cause for which a phase's time is counted. In a productive step, other phases are productive.
_OF_PHASE = {"data": "data", "checkpoint": "checkpoint", "eval": "evaluation", "compile": "start"}


# Cached, since it is called for every step, and most steps of a training have the same phases.
@lru_cache(256)
def _causes(codes: bytes) -> tuple[tuple[int, str], ...]:
    """Which phases of a step are not productive: the index and the cause of each."""
    words = [phase_word(code & PHASE_CODE) for code in codes]
    at_work = [at for at, word in enumerate(words) if word not in ("other", "data")]
    for one, next_one in pairwise(at_work):
        if words[one] == words[next_one] == "eval":
            # Between two batches of an evaluation, `other` is part of the evaluation.
            for at in range(one + 1, next_one):
                words[at] = "eval" if words[at] == "other" else words[at]
    return tuple((at, _OF_PHASE[word]) for at, word in enumerate(words) if word in _OF_PHASE)


class ProcessTime(NamedTuple):
    """What the accounting needs to know about a process, as read from its journal."""

    rank: str
    began_ns: int
    """When its journal was created. Together with the rank, this identifies the process."""
    started_ns: int
    """When the process started, which is before its imports."""
    ended_ns: int
    """When the process ended; 0 while it is alive."""
    state: str
    step: int | None = None
    """Its last step, as the program numbers steps."""
    launched_by: str = ""
    """Identifies the process that launched it; empty if unknown."""
    node: str = ""
    """The process's node; empty for this node."""
    journal: str = ""


class TimeSnapshot(NamedTuple):
    """A snapshot of a run's time, for other threads."""

    seconds: Mapping[str, float]
    """By cause, the sum over the ranks of this node."""
    attempts: int
    began_ns: int


class _Spent:
    """The time of one node's ranks by cause: a sum over the ranks, in nanoseconds."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self.ns = dict.fromkeys(TIME_CAUSES, 0) | _ns(kept.get("seconds", {}))
        self.late_ns = _ns(kept.get("late", {}))
        """The time counted as `late_rank`, by the rank or node for which the others waited."""
        self.charged_ns = _ns(kept.get("charged", {}))
        """The time counted as `late_rank`, by verdict."""

    def charge(self, verdict: str, name: str, lost_ns: int) -> None:
        """Move the lost time of a verdict from `productive` to `late_rank`.

        Time can be moved only once it is counted as productive. Later calls move the rest.
        """
        more_ns = min(lost_ns - self.charged_ns.get(verdict, 0), self.ns["productive"])
        if more_ns > 0:
            self.ns["productive"] -= more_ns
            self.ns["late_rank"] += more_ns
            self.late_ns[name] = self.late_ns.get(name, 0) + more_ns
            self.charged_ns[verdict] = self.charged_ns.get(verdict, 0) + more_ns

    def to_json(self) -> dict[str, Any]:
        seconds = {each: ns for each, ns in self.ns.items() if ns}
        parts = {"seconds": seconds, "late": self.late_ns, "charged": self.charged_ns}
        return {
            key: {each: round(ns / _S, 3) for each, ns in of.items()} for key, of in parts.items()
        }


def _ns(seconds: Mapping[str, float]) -> dict[str, int]:
    return {each: round(s * _S) for each, s in seconds.items()}


@dataclass
class _Rank:
    """The current process of one rank."""

    rank: str
    attempt: int
    began_ns: int
    until_ns: int
    """The time of the rank is counted up to here."""
    launched_by: str
    node: str
    has_trained: bool = False
    has_ended: bool = False
    clock: str = "host"
    """Only steps on this clock are counted: `device` if the rank has device steps."""


class RunTime:
    """Accounts for the time of one run. Only the history thread calls it."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.snapshot: TimeSnapshot | None = None
        """The snapshot made by the last call of `to_json`."""
        # The time spent, by node. The empty name means this node.
        self._spent = {"": _Spent()}
        self._ranks: dict[str, _Rank] = {}
        # The current processes, and ended ones with steps that are not counted yet. The key is the
        # rank and the creation time of the journal.
        self._processes: dict[tuple[str, int], ProcessTime] = {}
        # `_late_nodes`: for each verdict, the ranks that are late. `_hangs_since_ns`: since when
        # all ranks hang, or 0.
        self._late_nodes: dict[str, frozenset[str]] = {}
        self._hangs_since_ns = 0
        self._released: list[tuple[str, str, list[Placed]]] = []

    # -- stored in the history, for the next agent

    def restore(self, about: Mapping[str, Any]) -> bool:
        """Load the counts of an earlier agent, unless this one has begun to count.

        Returns whether they were loaded.
        """
        kept, attempts = about.get("time"), about.get("attempts")
        if self._ranks or not isinstance(kept, dict) or not isinstance(attempts, list):
            return False
        self.attempts = Attempts(attempts)
        spent = {"": kept, **kept.get("nodes", {})}
        self._spent = {node: _Spent(each) for node, each in spent.items()}
        self._ranks = {rank: _Rank(rank, *values) for rank, values in kept["ranks"].items()}
        return True

    def to_json(self) -> dict[str, Any]:
        """The counts, as keys of the history's `about`; empty before the first process."""
        if not self.attempts.entries:
            return {}
        ranks = {rank: astuple(each)[1:-1] for rank, each in self._ranks.items()}
        nodes = {node: each.to_json() for node, each in self._spent.items()}
        here = nodes.pop("")
        attempts = [dict(each) for each in self.attempts.entries]
        if any(any(each.ns.values()) for each in self._spent.values()):
            seconds = dict(here["seconds"])
            if self.snapshot is not None:
                # A Prometheus counter must not fall. If time that was counted as productive turns
                # out to be lost, `productive` keeps its value until as much productive time has
                # followed.
                before_s = self.snapshot.seconds.get("productive", 0.0)
                seconds["productive"] = max(before_s, seconds.get("productive", 0.0))
            self.snapshot = TimeSnapshot(seconds, attempts[-1]["attempt"], attempts[0]["began_ns"])
        spent = {**here, "ranks": ranks, "nodes": nodes}
        return {"time": spent, "attempts": attempts, "held": self.attempts.held()}

    # -- input

    def learn(self, processes: Iterable[ProcessTime]) -> None:
        """Learn which processes have ended. Call it before `feed` adds the steps of their
        successors."""
        # Keep the current process of each rank even if it is no longer in *processes*: soon after
        # its end, its journal is closed.
        kept = {(rank, each.began_ns) for rank, each in self._ranks.items()}
        self._processes = {key: each for key, each in self._processes.items() if key in kept}
        self._processes |= {(each.rank, each.began_ns): each for each in processes}

    def begin(self, process: ProcessTime, *, trains: bool) -> None:
        """Note the start of a process.

        Processes that do not take part in the training, such as evaluators, are ignored.
        """
        rank, began_ns, started_ns = process.rank, process.began_ns, process.started_ns
        known, entries = self._ranks.get(rank), self.attempts.entries
        if "/" in rank or (known is not None and began_ns <= known.began_ns):
            return
        before = None if known is None else self._processes.get((rank, known.began_ns))
        # A process with held steps has trained.
        is_at_work = before is not None and not before.ended_ns and rank not in self.attempts.held()
        if known is not None and not known.has_trained and is_at_work:
            # The rank's known process is still running without a step: it has only opened the run,
            # and has then started the process that trains.
            if trains:
                known.began_ns = began_ns
            return
        is_late = self.attempts.of(began_ns) != self.attempts.present
        is_next = known is not None and known.attempt == self.attempts.present and not is_late
        state, ended_ns = self._last_end(is_over=is_next) if entries and not is_late else ("", 0)
        if not entries or is_next or 0 < ended_ns < began_ns:
            if state == "finished" and not trains and (known is None or known.has_trained):
                # The training has finished, so this may be an evaluation. It counts once it has
                # made a step.
                return
            # If the agent was paused, it noticed the end only later, perhaps after the next start.
            ended_ns = min(ended_ns, began_ns)
            self._finish_attempt(began_ns)
            if ended_ns:
                self.attempts.end(ended_ns, state)
            self.attempts.begin(max(started_ns, ended_ns))
        elif ended_ns:
            self.attempts.go_on()
        until_ns = started_ns
        if known is not None:
            self._fill_gap(known, process)
            until_ns = max(known.until_ns, started_ns)
        attempt, by = self.attempts.of(began_ns), process.launched_by
        self._ranks[rank] = _Rank(rank, attempt, began_ns, until_ns, by, process.node)

    def _last_end(self, *, is_over: bool = False) -> tuple[str, int]:
        """State and time of the end of the current attempt; ("", 0) if it has not ended.

        *is_over*: the next attempt has begun. So if some processes have no end, do not wait for it:
        their node may be lost.
        """
        last = self.attempts.entries[-1]
        if "ended_ns" in last:
            return last["state"], last["ended_ns"]
        of_it = [e for e in self._ranks.values() if e.attempt == last["attempt"]]
        found = [(each, self._processes.get((each.rank, each.began_ns))) for each in of_it]
        # Ignore a rank if its process is unknown here and has ended or never trained: an earlier
        # agent saw its end, or it is another rank by now.
        known = [p for e, p in found if p is not None or (e.has_trained and not e.has_ended)]
        ended = [each for each in known if each is not None and each.ended_ns]
        if not ended or (len(ended) < len(known) and not is_over):
            return "", 0
        return worst_state(each.state for each in ended), max(each.ended_ns for each in ended)

    def _fill_gap(self, before: _Rank, after: ProcessTime) -> None:
        """Count the time between the previous process of a rank and its next one."""
        process = self._processes.get((before.rank, before.began_ns))
        if not before.has_ended and process is not None and process.ended_ns:
            self._end(before, process)
        attempts = [each for each in self.attempts.entries if each["attempt"] == before.attempt]
        # A launcher that restarts its ranks occupies the node in between. Between two launches,
        # such as over a weekend, the GPUs may have been free for other jobs.
        is_kept = after.launched_by and after.launched_by == before.launched_by
        # Whether the rank was missing in at least one attempt: the run continued without it.
        was_gone = not is_kept and before.attempt < self.attempts.entries[-1]["attempt"] - 1
        # After a run has finished, no time is lost, even if another launch resumes the run later.
        if not was_gone and (not attempts or attempts[0].get("state") != "finished"):
            self._spend(
                before, "between_attempts" if is_kept else "between_launches", after.started_ns
            )

    def feed(self, rank: str, clock: str, steps: Iterable[Step], attempt: int = 0) -> list[Placed]:
        """Count steps of a rank, timed on one clock. Returns the steps whose places among all
        attempts' steps are known by now.

        *attempt*: the number of the attempt; 0 for the current one.
        """
        if rank not in self._ranks:
            # The steps of other processes, such as evaluators, are numbered but not counted.
            return [Placed(each, each.number, False) for each in steps if each.number is not None]
        if attempt in (0, self.attempts.present):
            placed = self.attempts.place(rank, clock, steps)
        else:
            placed = self.attempts.place_late(attempt, steps)
        self._count(rank, clock, placed)
        return placed

    def _count(self, rank: str, clock: str, placed: Sequence[Placed]) -> None:
        known = self._ranks.get(rank)
        if known is None:
            return
        if clock == "device" and placed:
            known.clock = "device"
        if clock == known.clock:
            for each in placed:
                self._count_step(known, each)

    def _count_step(self, rank: _Rank, placed: Placed) -> None:
        step, ended_ns = placed.step, placed.step.ended_ns
        if ended_ns <= rank.until_ns or step.took_ns <= 0:
            return
        if not rank.has_trained:
            # The whole time up to the end of a rank's first step is its start-up.
            rank.has_trained = True
            self._spend(rank, "start", ended_ns)
            return
        # If records were lost, the time between the rank's last counted step and this one
        # counts as unknown.
        self._spend(rank, "unknown", step.began_ns)
        if placed.is_repeated is not False:
            self._spend(rank, "repeated" if placed.is_repeated else "unknown", ended_ns)
            return
        self._count_phases(rank, step)

    def _count_phases(self, rank: _Rank, step: Step) -> None:
        """Count the time of a step that is no repetition: that of some phases by cause, the rest as
        productive."""
        # Part of the step may already be counted as a hang. Divide only the rest, in the step's
        # proportions.
        spent, left_ns = self._of(rank), step.ended_ns - rank.until_ns
        share = left_ns / step.took_ns
        for at, cause in _causes(step.parts.codes):
            some_ns = min(round(step.parts.spans_ns[at] * share), left_ns)
            spent.ns[cause] += some_ns
            left_ns -= some_ns
        spent.ns["productive"] += left_ns
        rank.until_ns = step.ended_ns

    def _spend(self, rank: _Rank, cause: str, until_ns: int) -> None:
        """Count the rank's uncounted time up to *until_ns* for one cause."""
        if until_ns > rank.until_ns:
            self._of(rank).ns[cause] += until_ns - rank.until_ns
            rank.until_ns = until_ns

    def _of(self, rank: _Rank) -> _Spent:
        return self._spent.setdefault(rank.node, _Spent())

    def note(
        self, processes: Iterable[ProcessTime], verdicts: Sequence[Mapping[str, Any]], now_ns: int
    ) -> list[tuple[str, str, list[Placed]]]:
        """Update with the current processes and verdicts. Returns the steps that were held back and
        are now placed, as tuples of rank, clock and steps."""
        self._note_verdicts(verdicts)
        for each in processes:
            self.begin(each, trains=False)
            known = self._ranks.get(each.rank)
            if known is None or known.began_ns != each.began_ns or known.has_ended:
                continue
            if not each.ended_ns and not self._hangs_since_ns:
                continue
            self._release(each.rank)
            if each.ended_ns:
                self._end(known, each)
            elif known.has_trained:
                self._spend(known, "productive", min(self._hangs_since_ns, now_ns))
                self._spend(known, "hang", now_ns)
        if self._ranks and "ended_ns" not in self.attempts.entries[-1]:
            state, ended_ns = self._last_end()
            if ended_ns:
                self.attempts.end(ended_ns, state)
        released, self._released = self._released, []
        return released

    def _release(self, rank: str) -> None:
        """Count the steps of a rank that were held back, without waiting longer for the program's
        step numbers."""
        for clock in ("device", "host"):
            placed = self.attempts.release(rank, clock)
            self._count(rank, clock, placed)
            if placed:
                self._released.append((rank, clock, placed))

    def _finish_attempt(self, next_ns: int) -> None:
        """Note the ends of the current attempt's ranks: the agent may learn of them after the next
        start."""
        for each in self._ranks.values():
            self._release(each.rank)
            process = self._processes.get((each.rank, each.began_ns))
            if process is not None and process.ended_ns and not each.has_ended:
                self._end(each, process._replace(ended_ns=min(process.ended_ns, next_ns)))

    def _end(self, rank: _Rank, process: ProcessTime) -> None:
        """Count the time up to the end of a rank's process."""
        rank.has_ended = True
        if rank.has_trained:
            if process.step is not None and rank.attempt == self.attempts.entries[-1]["attempt"]:
                self.attempts.reach(process.rank, process.step)
            # Unless the process has finished, it was inside a step, and the time of this step is
            # lost.
            cause = "end" if process.state == "finished" else "unknown"
            self._spend(rank, cause, process.ended_ns)
        elif process.state != "finished":
            # A process that has finished without any step was no training: do not count its time.
            self._spend(rank, "start", process.ended_ns)

    def _note_verdicts(self, verdicts: Sequence[Mapping[str, Any]]) -> None:
        is_open = [each for each in verdicts if each.get("until_ns") is None]
        hangs = [each["since_ns"] for each in is_open if each["kind"] == "stall"]
        self._hangs_since_ns = min(hangs, default=0)
        self._charge([each for each in verdicts if each["kind"] in _LATE])
        deaths = [each for each in verdicts if each["kind"] == "death"]
        taken_back = [each for each in deaths if is_taken_back(each.get("evidence"))]
        standing = [each for each in deaths if each not in taken_back]
        explained = {each["since_ns"] for each in standing}
        for since_ns in {each["since_ns"] for each in taken_back} - explained:
            self.attempts.take_back(since_ns)
        for each in sorted(standing, key=lambda each: each["since_ns"]):
            # Use only open verdicts. A restart of the run closes its verdicts on deaths, which do
            # not explain a later end.
            if each in is_open:
                self.attempts.explain(each["since_ns"], each["sentence"])

    def _charge(self, verdicts: Iterable[Mapping[str, Any]]) -> None:
        """Count the time that late ranks and nodes have cost, according to their verdicts, on the
        nodes of the ranks that waited."""
        present = {}
        for each in verdicts:
            who, evidence = each["who"], each.get("evidence") or {}
            rank, node = who.get("rank"), str(who.get("node", ""))
            name = f"rank {rank} ({node})" if rank else node
            key = f"{each['kind']} {name} {each['since_ns']}"
            # A closed verdict no longer lists the late ranks. Use the ranks that it listed before.
            late = frozenset(evidence.get("ranks", ())) or self._late_nodes.get(key, frozenset())
            present[key] = late | {rank}
            others = evidence.get("others")
            waiting = [one for at, one in self._ranks.items() if at not in present[key]]
            for node, count in Counter(one.node for one in waiting).items():
                lost_s = evidence.get("lost_s", 0.0) * count / (others or len(waiting))
                self._spent.setdefault(node, _Spent()).charge(key, name, round(lost_s * _S))
        self._late_nodes = present
        for spent in self._spent.values():
            spent.charged_ns = {key: ns for key, ns in spent.charged_ns.items() if key in present}
