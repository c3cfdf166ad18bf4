"""Finds ranks that stall at regular intervals, in one phase or in garbage collections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from otel_ddp.diagnosis.medians import excesses, median
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, cost, duration, phase_in_words, rank_name
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import some_of
from otel_ddp.diagnosis.straggler.window import ExcessHistory, works_ns
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import GARBAGE, WORK_PHASES

_ADVICE = (
    "Look at what this rank alone does so often: opening a file or a shard, filling a buffer, "
    "logging, saving, evaluation."
)


class _Stall(NamedTuple):
    """A stall: one step, or a few close to each other, in which one rank took far longer than the
    others."""

    number: int
    # The number of the last of the stall's steps; `number` is that of the first.
    last: int
    ended_ns: int
    # How long the step would have taken without the stall.
    step_ns: float
    excess_ns: float


class _Rank:
    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        # The last stalls by phase.
        self.stalls: dict[str, list[_Stall]] = {}
        self.verdict: Verdict | None = None
        # The time that the others have lost since the verdict was opened.
        self.lost_s = 0.0


class RecurringStalls:
    """Finds recurring stalls in one run. It also gets unusual steps, such as checkpoints."""

    def __init__(self) -> None:
        self._left_out: Sequence[int] = ()
        self._ranks: list[_Rank] = []
        # Stalls of the last step that may not count yet: index of the rank, phase, stall, and how
        # long the others waited in that step.
        self._pending: list[tuple[int, str, _Stall, float]] = []
        self._changes: list[Change] = []
        self.lost_s: dict[Labels, float] = {}
        """Seconds that other ranks have waited in recurring stalls, by rank."""

    def start_again(self, history: ExcessHistory) -> None:
        """Start over with the ranks of *history*."""
        for rank in self._ranks:
            self._close(rank)
        self._left_out = history.window.left_out
        self._pending.clear()
        self._ranks = [_Rank(unit.labels) for unit in history.units]

    def feed(
        self,
        number: int,
        facts: Sequence[StepFacts],
        excesses_ns: Sequence[float] | None,
        others: int,
    ) -> None:
        """Add a step of all ranks.

        *excesses_ns*: the excess of each rank; None if the step is unusual. *others*: how many
        other ranks the job has.
        """
        for i, phase, stall, waited_ns in self._pending:
            # If the stall came after the last collective of its step, the others wait for the rank
            # only in the next step. So add their waits in both steps.
            if waited_ns + _waited_ns(i, facts) >= limits.RECURS_WAITED * stall.excess_ns:
                self._append(self._ranks[i], phase, stall, others)
        for rank in self._ranks:
            if rank.verdict is not None:
                stalls = rank.stalls[rank.verdict.phase]
                longest = max(later.number - before.number for before, later in pairwise(stalls))
                if number - stalls[-1].number > limits.RECURS_OVERDUE * longest:
                    self._close(rank)
        self._pending = []
        for i, phase, excess_ns in self._stalls(facts, excesses_ns):
            step_ns = facts[i].took_ns - excess_ns
            stall = _Stall(number, number, facts[i].ended_ns, step_ns, excess_ns)
            self._pending.append((i, phase, stall, _waited_ns(i, facts)))

    def _stalls(
        self, facts: Sequence[StepFacts], excesses_ns: Sequence[float] | None
    ) -> Iterator[tuple[int, str, float]]:
        """The index, phase and excess of each rank that stalls in this step."""
        if excesses_ns is None:
            odd = [i for i, each in enumerate(facts) if each.unusual and not each.garbage_ns]
            if len(odd) > limits.UNUSUAL * len(facts):
                return
            all_ns = works_ns(columns_of(facts), self._left_out)
            for i in odd:
                all_ns[i] = round(median(all_ns))
            excesses_ns = excesses(all_ns)
        collected_ns = sum([each.garbage_ns for each in facts])
        for i, (each, excess_ns) in enumerate(zip(facts, excesses_ns, strict=True)):
            if each.garbage_ns:
                # Subtract the mean collection time of the other ranks: if ranks collect in turn,
                # each delays the others as much as they delay it.
                mean_ns = (collected_ns - each.garbage_ns) / (len(facts) - 1)
                # Count at most the excess: a collection that runs while the rank itself waits
                # delays nobody.
                more_ns = min(each.garbage_ns - mean_ns, excess_ns)
                if more_ns > limits.EXCESS_NS:
                    yield i, GARBAGE, more_ns
                continue
            step_ns = each.took_ns - excess_ns
            if excess_ns > max(limits.RECURS_OF_STEP * step_ns, limits.RECURS_SHORTEST_NS):
                yield i, _phase(facts, i, excess_ns, self._left_out), excess_ns

    def _append(self, rank: _Rank, phase: str, stall: _Stall, others: int) -> None:
        stalls, more_ns = rank.stalls.setdefault(phase, []), stall.excess_ns
        # Merge stalls that are a few steps apart, except for garbage collections.
        if stalls and phase != GARBAGE and stall.number <= stalls[-1].last + limits.RECURS_APART:
            first = stalls.pop()
            excess_ns = first.excess_ns + more_ns
            stall = stall._replace(number=first.number, excess_ns=excess_ns)
        stalls.append(stall)
        del stalls[: -limits.RECURS_SHOWN]
        before = rank.verdict
        if before is None:
            stalls = stalls[-limits.RECURS_REGULAR :]
            if self._recur(rank, phase, stalls) and _cost(stalls) > limits.RECURS_COST:
                rank.verdict = self._charged(rank, phase, stalls, others, _sum_ns(stalls))
                self._changes.append(Change(rank.verdict, True))
        elif before.phase == phase:
            verdict = self._charged(rank, phase, stalls, others, more_ns)
            rank.verdict = verdict._replace(since_ns=before.since_ns, step=before.step)
            if _varies(stalls) > limits.RECURS_ALIKE_STILL or _cost(stalls) < limits.RECURS_STILL:
                self._close(rank)

    def _recur(self, rank: _Rank, phase: str, stalls: Sequence[_Stall]) -> bool:
        """Whether these stalls recur: they are regular, and other ranks hardly stall in this
        phase."""
        if len(stalls) < limits.RECURS_REGULAR or _varies(stalls) > limits.RECURS_ALIKE:
            return False
        since, own_ns = stalls[0].number, _sum_ns(stalls[1:])
        several = [self._ranks[at] for at in some_of(len(self._ranks))]
        others_ns = [
            _sum_ns([stall for stall in each.stalls.get(phase, ()) if stall.number > since])
            for each in several
            if each is not rank
        ]
        return median(others_ns) <= limits.RECURS_OF_OTHERS * own_ns

    # -- verdicts

    def _charged(
        self, rank: _Rank, phase: str, stalls: Sequence[_Stall], others: int, more_ns: float
    ) -> Verdict:
        more_s = more_ns / 1e9 * others
        rank.lost_s += more_s
        self.lost_s[rank.labels] = self.lost_s.get(rank.labels, 0.0) + more_s
        return _verdict(rank, phase, stalls, others)

    def _close(self, rank: _Rank) -> None:
        if rank.verdict is not None:
            until_ns = rank.stalls[rank.verdict.phase][-1].ended_ns
            self._changes.append(Change(rank.verdict._replace(until_ns=until_ns), False))
            rank.stalls.clear()
            rank.verdict, rank.lost_s = None, 0.0

    def present(self) -> list[Verdict]:
        """The open verdicts with the figures of the last stall."""
        return [rank.verdict for rank in self._ranks if rank.verdict is not None]

    def poll(self) -> list[Change]:
        """The changes since the last poll."""
        changes, self._changes = self._changes, []
        return changes


def _waited_ns(i: int, facts: Sequence[StepFacts]) -> float:
    """How long the typical rank other than *i* waited in this step."""
    return median([each.wait_ns for each in (*facts[:i], *facts[i + 1 :])])


def _phase(facts: Sequence[StepFacts], i: int, excess_ns: float, left_out: Sequence[int]) -> str:
    """The phase that holds most of a stall of rank *i*."""
    columns = zip(*[each.phases_ns for each in facts], strict=True)
    by_phase = {
        WORK_PHASES[at]: excesses(column)[i]
        for at, column in enumerate(columns)
        if at not in left_out
    }
    phase = max(by_phase, key=by_phase.__getitem__)
    return phase if by_phase[phase] >= limits.RECURS_MOST_OF * excess_ns else "mixed"


def _sum_ns(stalls: Sequence[_Stall]) -> float:
    return sum([each.excess_ns for each in stalls])


def _every(stalls: Sequence[_Stall]) -> float:
    """The mean distance of consecutive stalls, in steps."""
    return (stalls[-1].number - stalls[0].number) / (len(stalls) - 1)


def _varies(stalls: Sequence[_Stall]) -> float:
    """The coefficient of variation of the distances between stalls.

    Distances are whole steps: stalls every 5.5 steps have distances of 5 and 6. So half a step is
    subtracted from the standard deviation.
    """
    mean = _every(stalls)
    gaps = [later.number - earlier.number for earlier, later in pairwise(stalls)]
    deviation = (sum([(gap - mean) ** 2 for gap in gaps]) / len(gaps)) ** 0.5
    return float(max(deviation - 0.5, 0.0) / mean)


def _cost(stalls: Sequence[_Stall]) -> float:
    """The stalls' share of the time between the first and the last stall."""
    return _sum_ns(stalls[1:]) / max(stalls[-1].ended_ns - stalls[0].ended_ns, 1)


def _verdict(rank: _Rank, phase: str, stalls: Sequence[_Stall], others: int) -> Verdict:
    stall_s = median([each.excess_ns for each in stalls]) / 1e9
    step_s = median([each.step_ns for each in stalls]) / 1e9
    evidence = {
        "recurs_every": round(_every(stalls), 1),
        "stall_s": round(stall_s, 6),
        "step_s": round(step_s, 6),
        "stalls": len(stalls),
        "lost_per_s": round(_cost(stalls) * others, 4),
        "lost_s": round(rank.lost_s, 3),
    }
    sentence = (
        f"{rank_name(rank.labels)} stalls in {phase_in_words(phase)} about every "
        f"{_every(stalls):.0f} steps: it needs {duration(stall_s)} longer than the others, where "
        f"a step takes {duration(step_s)}; {cost(others, _cost(stalls) * others)}. "
        f"{COLLECT_TOGETHER if phase == GARBAGE else _ADVICE}"
    )
    first, last = stalls[0], stalls[-1]
    return Verdict("recurring", rank.labels, phase, sentence, evidence, last.number, first.ended_ns)
