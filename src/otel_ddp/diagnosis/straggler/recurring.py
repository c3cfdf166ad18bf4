"""Finds ranks that stall in one phase again and again, each so many steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from otel_ddp.diagnosis.medians import excesses, median, without
from otel_ddp.diagnosis.say import duration, rank_name
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import WORK_PHASES

_KEPT = limits.RECURS_ALIKE[-1][0] + 1
_ADVICE = {
    "data": "Look at what its loader does so often: opens a file or a shard, fills a buffer, "
    "starts workers.",
    "other": "Look at what this rank alone does so often between the phases: logging, saving, "
    'evaluation; say phase("checkpoint") or phase("eval") where it is one.',
}


class _Stall(NamedTuple):
    number: int
    ended_ns: int
    excess_ns: float
    step_ns: float
    """What the step would have taken without it."""


class _Trail:
    """The last stalls of one rank in one phase."""

    def __init__(self) -> None:
        self._stalls: deque[_Stall] = deque(maxlen=_KEPT)

    def append(self, stall: _Stall) -> None:
        self._stalls.append(stall)

    def last(self, stalls: int = _KEPT) -> list[_Stall]:
        """The last ones, oldest first."""
        return list(islice(self._stalls, max(len(self._stalls) - stalls, 0), None))

    def regular(self) -> list[_Stall]:
        """The last stalls, where their distances are alike; else none."""
        for gaps, most in limits.RECURS_ALIKE:
            stalls = self.last(gaps + 1)
            if len(stalls) > gaps and _varies(stalls) <= most:
                return stalls
        return []


class _Case(NamedTuple):
    """An open verdict on a rank."""

    verdict: Verdict
    trail: _Trail
    lost_s: float


class _Rank:
    """One rank."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.trails: dict[str, _Trail] = {}
        # The last excesses, without those of stalls; how many there were.
        self._usual_ns: deque[float] = deque(maxlen=limits.RECURS_USUAL)
        self._steps = 0
        # Their median and their spread, and after how many of them that was.
        self._known = (0.0, 0.0, -limits.RECURS_LEARNS)
        self.case: _Case | None = None

    def is_stall(self, excess_ns: float, step_ns: float) -> bool:
        """Whether this excess is more than lateness; *step_ns*: the step without it."""
        least_ns = max(limits.RECURS_OF_STEP * step_ns, limits.RECURS_SHORTEST_NS)
        if excess_ns <= least_ns or self._steps < limits.RECURS_LEAST_USUAL:
            return False
        usual, spread = self._usual()
        # Of a rank that is late in every step, it has to be later than that.
        return excess_ns > usual + max(least_ns, limits.RECURS_OF_USUAL * spread)

    def append_usual(self, excess_ns: float) -> None:
        """One more excess that was no stall."""
        self._usual_ns.append(excess_ns)
        self._steps += 1

    def _usual(self) -> tuple[float, float]:
        usual, spread, since = self._known
        if self._steps - since >= limits.RECURS_LEARNS:
            usual = median(self._usual_ns)
            spread = median([abs(each - usual) for each in self._usual_ns])
            self._known = usual, spread, self._steps
        return usual, spread


class RecurringStalls:
    """The ranks of one run. Fed with each ordinary step of all ranks."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._changes: list[Change] = []
        self.lost_s: dict[Labels, float] = {}
        """What the other ranks of the job have waited in recurring stalls, by rank."""

    def start_again(self, ranks: Sequence[Labels]) -> None:
        """From now on these ranks are compared, or other phases of theirs."""
        for rank in self._ranks:
            self._close(rank)
        self._ranks = [_Rank(labels) for labels in ranks]

    def feed(
        self,
        number: int,
        facts: Sequence[StepFacts],
        excesses_ns: Sequence[float],
        not_compared: Sequence[int],
        others: int,
    ) -> None:
        """One step of all ranks. *others*: how many ranks of the whole job wait for one."""
        step_ns = median([each.took_ns for each in facts])
        for i, (rank, excess_ns) in enumerate(zip(self._ranks, excesses_ns, strict=True)):
            if rank.case is not None:
                self._close_overdue(rank, rank.case, number)
            usual_ns = step_ns - max(excess_ns, 0.0)
            if not rank.is_stall(excess_ns, usual_ns):
                rank.append_usual(excess_ns)
                continue
            waits_ns = without([each.wait_ns for each in facts], i)
            if median(waits_ns) < limits.RECURS_WAITED * excess_ns:
                continue
            phase = _phase(i, facts, not_compared, excess_ns)
            trail = rank.trails.setdefault(phase, _Trail())
            trail.append(_Stall(number, facts[i].ended_ns, excess_ns, usual_ns))
            if rank.case is None:
                self._open(rank, phase, trail, others)
            elif rank.case.trail is trail:
                self._continue(rank, rank.case, others)

    def _open(self, rank: _Rank, phase: str, trail: _Trail, others: int) -> None:
        stalls = trail.regular()
        if (
            not stalls
            or _every(stalls) < limits.RECURS_LEAST_EVERY
            or _cost(stalls) <= limits.RECURS_COST
        ):
            return
        lost_s = self._charge(rank, sum(each.excess_ns for each in stalls), others)
        verdict = _verdict(rank.labels, phase, stalls, others, lost_s)
        rank.case = _Case(verdict, trail, lost_s)
        self._changes.append(Change(verdict, True))

    def _continue(self, rank: _Rank, case: _Case, others: int) -> None:
        """One more stall."""
        before, stalls = case.verdict, case.trail.last()
        if _varies(stalls) > limits.RECURS_ALIKE_STILL or _cost(stalls) < limits.RECURS_COST_STILL:
            self._close(rank)
            return
        lost_s = case.lost_s + self._charge(rank, stalls[-1].excess_ns, others)
        verdict = _verdict(rank.labels, before.phase, stalls, others, lost_s)
        verdict = verdict._replace(since_ns=before.since_ns, step=before.step)
        rank.case = case._replace(verdict=verdict, lost_s=lost_s)

    def _charge(self, rank: _Rank, excess_ns: float, others: int) -> float:
        lost_s = excess_ns / 1e9 * others
        self.lost_s[rank.labels] = self.lost_s.get(rank.labels, 0.0) + lost_s
        return lost_s

    def _close_overdue(self, rank: _Rank, case: _Case, number: int) -> None:
        stalls = case.trail.last()
        if number - stalls[-1].number > limits.RECURS_OVERDUE * _every(stalls):
            self._close(rank, stalls[-1].ended_ns)

    def _close(self, rank: _Rank, until_ns: int = 0) -> None:
        if rank.case is not None:
            self._changes.append(Change(rank.case.verdict._replace(until_ns=until_ns), False))
            rank.case = None
            rank.trails.clear()

    def present(self) -> list[Verdict]:
        """The open verdicts, with the figures of the last stall."""
        return [rank.case.verdict for rank in self._ranks if rank.case is not None]

    def poll(self) -> list[Change]:
        """What has changed since the last poll."""
        changes, self._changes = self._changes, []
        return changes


def _every(stalls: Sequence[_Stall]) -> float:
    """Their mean distance, in steps."""
    return (stalls[-1].number - stalls[0].number) / (len(stalls) - 1)


def _varies(stalls: Sequence[_Stall]) -> float:
    """The standard deviation of their distances, as a share of the mean."""
    mean = _every(stalls)
    gaps = [after.number - before.number for before, after in pairwise(stalls)]
    return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)


def _cost(stalls: Sequence[_Stall]) -> float:
    """The share of the time between the first and the last one that they took."""
    spent_ns = stalls[-1].ended_ns - stalls[0].ended_ns
    return sum(each.excess_ns for each in stalls[1:]) / max(spent_ns, 1)


def _phase(
    i: int, facts: Sequence[StepFacts], not_compared: Sequence[int], excess_ns: float
) -> str:
    """The phase that holds most of what rank *i* needed longer in this step."""
    columns = zip(*[each.phases_ns for each in facts], strict=True)
    longest_ns, phase = max(
        (excesses(column)[i], word)
        for at, (word, column) in enumerate(zip(WORK_PHASES, columns, strict=True))
        if at not in not_compared
    )
    return phase if longest_ns >= limits.RECURS_MOST_OF * excess_ns else "mixed"


def _verdict(
    labels: Labels, phase: str, stalls: Sequence[_Stall], others: int, lost_s: float
) -> Verdict:
    every, share = _every(stalls), _cost(stalls)
    stall_s = median([each.excess_ns for each in stalls]) / 1e9
    step_s = median([each.step_ns for each in stalls]) / 1e9
    lose = "the other ranks together lose" if others > 1 else "the other rank loses"
    where = "several phases" if phase == "mixed" else phase
    sentence = (
        f"{rank_name(labels)} stalls in {where} about every {every:.0f} steps: it needs "
        f"{duration(stall_s)} longer than the others, where a step takes {duration(step_s)}; "
        f"{lose} {share * others:.2g} s each second. "
        f"{_ADVICE.get(phase, 'Look at what this rank alone does so often.')}"
    )
    evidence = {
        "recurs_every": round(every, 1),
        "stall_s": round(stall_s, 6),
        "step_s": round(step_s, 6),
        "stalls": len(stalls),
        "lost_per_s": round(share * others, 4),
        "lost_s": round(lost_s, 3),
    }
    first, last = stalls[0], stalls[-1]
    return Verdict("recurring", labels, phase, sentence, evidence, last.number, first.ended_ns)
