"""Accounts for the rank-seconds of a run: productive time, and time lost by cause.

Each second of a rank counts once, from the start of its first process.
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
# The causes to which phases are counted; the time in all other phases is productive if the step is.
_OF_PHASE = {"data": "data", "checkpoint": "checkpoint", "eval": "evaluation", "compile": "start"}


# Cached: called for every step, and the steps of one training are alike.
@lru_cache(256)
def _causes(codes: bytes) -> tuple[tuple[int, str], ...]:
    """The indices of a step's phases whose time is lost, with the causes."""
    words = [phase_word(code & PHASE_CODE) for code in codes]
    at_work = [at for at, word in enumerate(words) if word not in ("other", "data")]
    for one, next_one in pairwise(at_work):
        if words[one] == words[next_one] == "eval":
            # Count the time between two batches of an evaluation as evaluation.
            for at in range(one + 1, next_one):
                words[at] = "eval" if words[at] == "other" else words[at]
    return tuple((at, _OF_PHASE[word]) for at, word in enumerate(words) if word in _OF_PHASE)


class ProcessTime(NamedTuple):
    """The current times of a process, by its journal."""

    rank: str
    began_ns: int
    """When its journal began; identifies the process within its rank."""
    started_ns: int
    """The start of the process, before its imports."""
    ended_ns: int
    """0 while it is alive."""
    state: str
    step: int | None = None
    """Its last step, by the program's number."""
    launched_by: str = ""
    """Identifies the process that launched it; empty if unknown."""
    node: str = ""
    """Empty for this node."""
    journal: str = ""


class TimeSnapshot(NamedTuple):
    """A snapshot of a run's time, for other threads."""

    seconds: Mapping[str, float]
    """By cause, for the ranks of this node."""
    attempts: int
    began_ns: int


class _Spent:
    """The rank-nanoseconds of one node, by cause."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self.ns = dict.fromkeys(TIME_CAUSES, 0) | _ns(kept.get("seconds", {}))
        self.late_ns = _ns(kept.get("late", {}))
        """The part `late_rank`, by the rank or node that others waited for."""
        self.charged_ns = _ns(kept.get("charged", {}))
        """The part `late_rank`, by verdict."""

    def charge(self, verdict: str, name: str, lost_ns: int) -> None:
        """Move the lost time of a verdict from `productive` to `late_rank`.

        If its steps are not counted yet, the rest is moved by later calls.
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
    """The clock whose steps count: `device` if the device has one."""


class RunTime:
    """Accounts for the time of one run. Only the history thread calls it."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.snapshot: TimeSnapshot | None = None
        """The snapshot of the last call of `to_json`."""
        # By node; the empty name means this node.
        self._spent = {"": _Spent()}
        self._ranks: dict[str, _Rank] = {}
        # By rank and start: current processes, and ended ones with uncounted steps.
        self._processes: dict[tuple[str, int], ProcessTime] = {}
        # The late ranks by verdict, and since when all ranks hang.
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
                # A counter must not fall: if counted time turns out to be lost, it stands still for
                # as long.
                before_s = self.snapshot.seconds.get("productive", 0.0)
                seconds["productive"] = max(before_s, seconds.get("productive", 0.0))
            self.snapshot = TimeSnapshot(seconds, attempts[-1]["attempt"], attempts[0]["began_ns"])
        spent = {**here, "ranks": ranks, "nodes": nodes}
        return {"time": spent, "attempts": attempts, "held": self.attempts.held()}

    # -- input

    def learn(self, processes: Iterable[ProcessTime]) -> None:
        """Learn which processes have ended, before `feed` adds the steps of the next ones."""
        # Keep current processes: the journal of an ended one is closed soon.
        kept = {(rank, each.began_ns) for rank, each in self._ranks.items()}
        self._processes = {key: each for key, each in self._processes.items() if key in kept}
        self._processes |= {(each.rank, each.began_ns): each for each in processes}

    def begin(self, process: ProcessTime, *, trains: bool) -> None:
        """Note the start of a process.

        Processes beside the training, such as evaluators, are ignored.
        """
        rank, began_ns, started_ns = process.rank, process.began_ns, process.started_ns
        known, entries = self._ranks.get(rank), self.attempts.entries
        if "/" in rank or (known is not None and began_ns <= known.began_ns):
            return
        before = None if known is None else self._processes.get((rank, known.began_ns))
        is_at_work = before is not None and not before.ended_ns
        if known is not None and not known.has_trained and is_at_work:
            # The known process has only opened the run, and has started the one that trains.
            if trains:
                known.began_ns = began_ns
            return
        is_late = self.attempts.of(began_ns) != self.attempts.present
        is_next = known is not None and known.attempt == self.attempts.present and not is_late
        state, ended_ns = self._last_end(is_over=is_next) if entries and not is_late else ("", 0)
        if not entries or is_next or 0 < ended_ns < began_ns:
            if state == "finished" and not trains and (known is None or known.has_trained):
                # It may be an evaluation after the training.
                return
            if ended_ns:
                # A paused agent has seen the end late.
                ended_ns = min(ended_ns, began_ns)
                self._finish_attempt(began_ns)
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
        """State and time of the end of the current attempt; ("", 0) while one of its processes
        runs.

        *is_over*: the next attempt has begun, so ranks of a lost node are no longer waited for.
        """
        last = self.attempts.entries[-1]
        if "ended_ns" in last:
            return last["state"], last["ended_ns"]
        of_it = [e for e in self._ranks.values() if e.attempt == last["attempt"]]
        found = [(each, self._processes.get((each.rank, each.began_ns))) for each in of_it]
        # Without ranks whose process is not known here: an earlier agent saw its end, or it has
        # changed its rank.
        known = [p for e, p in found if p is not None or (e.has_trained and not e.has_ended)]
        ended = [each for each in known if each is not None and each.ended_ns]
        if not ended or (len(ended) < len(known) and not is_over):
            return "", 0
        return worst_state(each.state for each in ended), max(each.ended_ns for each in ended)

    def _fill_gap(self, before: _Rank, after: ProcessTime) -> None:
        """Count the time between two processes of a rank."""
        process = self._processes.get((before.rank, before.began_ns))
        if not before.has_ended and process is not None and process.ended_ns:
            self._end(before, process)
        attempts = [each for each in self.attempts.entries if each["attempt"] == before.attempt]
        # A launcher that restarts its ranks keeps the node; between two launches, such as over a
        # weekend, its GPUs may have been free.
        is_kept = after.launched_by and after.launched_by == before.launched_by
        # The run continued without this rank.
        was_gone = not is_kept and before.attempt < self.attempts.entries[-1]["attempt"] - 1
        # A finished run loses no time until another launch resumes it.
        if not was_gone and (not attempts or attempts[0].get("state") != "finished"):
            self._spend(
                before, "between_attempts" if is_kept else "between_launches", after.started_ns
            )

    def feed(self, rank: str, clock: str, steps: Iterable[Step], attempt: int = 0) -> list[Placed]:
        """Count steps by one clock; returns those whose places are known by now.

        *attempt*: the number of the attempt; 0 for the current one.
        """
        if rank not in self._ranks:
            # A process beside the training, such as an evaluator, has steps of its own.
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
            # Everything up to the end of the first step is its start.
            rank.has_trained = True
            self._spend(rank, "start", ended_ns)
            return
        # The time since the last counted step, if records were lost in between.
        self._spend(rank, "unknown", step.began_ns)
        if placed.is_repeated is not False:
            self._spend(rank, "repeated" if placed.is_repeated else "unknown", ended_ns)
            return
        self._count_phases(rank, step)

    def _count_phases(self, rank: _Rank, step: Step) -> None:
        """Count the phases of a step that moved the run on."""
        # Part of the step may be counted already, as a hang.
        spent, left_ns = self._of(rank), step.ended_ns - rank.until_ns
        share = left_ns / step.took_ns
        for at, cause in _causes(step.parts.codes):
            some_ns = min(round(step.parts.spans_ns[at] * share), left_ns)
            spent.ns[cause] += some_ns
            left_ns -= some_ns
        spent.ns["productive"] += left_ns
        rank.until_ns = step.ended_ns

    def _spend(self, rank: _Rank, cause: str, until_ns: int) -> None:
        """Count the time of a rank up to *until_ns* for one cause."""
        if until_ns > rank.until_ns:
            self._of(rank).ns[cause] += until_ns - rank.until_ns
            rank.until_ns = until_ns

    def _of(self, rank: _Rank) -> _Spent:
        return self._spent.setdefault(rank.node, _Spent())

    def note(
        self, processes: Iterable[ProcessTime], verdicts: Sequence[Mapping[str, Any]], now_ns: int
    ) -> list[tuple[str, str, list[Placed]]]:
        """Update with the current state. Returns released steps: rank, clock, steps."""
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
        """Count the steps of a rank that were held until their numbers are known."""
        for clock in ("device", "host"):
            placed = self.attempts.release(rank, clock)
            self._count(rank, clock, placed)
            if placed:
                self._released.append((rank, clock, placed))

    def _finish_attempt(self, next_ns: int) -> None:
        """End the ranks of the current attempt: their ends may be noted after the next start."""
        for each in self._ranks.values():
            process = self._processes.get((each.rank, each.began_ns))
            if process is not None and process.ended_ns and not each.has_ended:
                self._release(each.rank)
                self._end(each, process._replace(ended_ns=min(process.ended_ns, next_ns)))

    def _end(self, rank: _Rank, process: ProcessTime) -> None:
        """Count the time up to the end of a rank's process."""
        rank.has_ended = True
        if rank.has_trained:
            if process.step is not None and rank.attempt == self.attempts.entries[-1]["attempt"]:
                self.attempts.reach(process.rank, process.step)
            # The time of its unfinished step is lost.
            cause = "end" if process.state == "finished" else "unknown"
            self._spend(rank, cause, process.ended_ns)
        elif process.state != "finished":
            # A process that finishes without a step is no training.
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
            # Only open verdicts: once the run is restarted, its verdicts on deaths are closed.
            if each in is_open:
                self.attempts.explain(each["since_ns"], each["sentence"])

    def _charge(self, verdicts: Iterable[Mapping[str, Any]]) -> None:
        """Charge the cost of late ranks and nodes, by their verdicts, to the waiting ranks."""
        present = {}
        for each in verdicts:
            who, evidence = each["who"], each.get("evidence") or {}
            rank, node = who.get("rank"), str(who.get("node", ""))
            name = f"rank {rank} ({node})" if rank else node
            key = f"{each['kind']} {name} {each['since_ns']}"
            # A closed verdict no longer lists the ranks.
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
