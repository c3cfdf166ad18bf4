"""Finds ranks that stall at regular distances, in one phase or by collections of garbage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from otel_ddp.diagnosis.medians import excesses, median, spread, without
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, duration, phase_in_words, rank_name
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import some_of
from otel_ddp.diagnosis.straggler.window import ExcessHistory, Window, works_ns
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import GARBAGE, WORK_PHASES

_ADVICE = (
    "Look at what this rank alone does so often: opening a file or a shard, filling a buffer, "
    "logging, saving, evaluation."
)


class _Stall:
    """One step, or several that follow each other closely."""

    def __init__(self, number: int, step_ns: float) -> None:
        """*number*: of its first step. *step_ns*: what that would have taken without it."""
        self.number = self.last = number
        self.step_ns = step_ns
        self.ended_ns, self.excess_ns = 0, 0.0
        self.waited_ns = 0.0
        """How long the typical other rank waited in these steps, and in the one behind each."""

    def add(self, number: int, ended_ns: int, excess_ns: float) -> None:
        """One more step, in which the rank needed so much longer than usual."""
        self.last, self.ended_ns = number, ended_ns
        self.excess_ns += excess_ns

    def is_one(self, phase: str) -> bool:
        """Whether it is long enough, and the others have waited for it."""
        least_ns = max(limits.RECURS_OF_STEP * self.step_ns, limits.RECURS_SHORTEST_NS)
        is_long = phase == GARBAGE or self.excess_ns > least_ns
        return is_long and self.waited_ns >= limits.RECURS_WAITED * self.excess_ns


class _Rank:
    """One rank."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.stalls: dict[str, list[_Stall]] = {}
        """The last ones in each phase."""
        self.verdict: Verdict | None = None
        self.lost_s = 0.0
        """What the others have lost since it was opened."""


class RecurringStalls:
    """The ranks of one run. Fed with each step of all ranks, unusual ones too."""

    def __init__(self) -> None:
        self._history = ExcessHistory(Window())
        self._ranks: list[_Rank] = []
        # By place of a rank: its usual excess, and how much that varies. Since the last stride.
        self._usual_ns: dict[int, tuple[float, float]] = {}
        # By place of a rank and phase: those that may go on.
        self._open: dict[tuple[int, str], _Stall] = {}
        self._changes: list[Change] = []
        self.lost_s: dict[Labels, float] = {}
        """What the other ranks of the job have waited in recurring stalls, by rank."""

    def start_again(self, history: ExcessHistory) -> None:
        """From now on these ranks are compared: *history* has their usual steps."""
        for rank in self._ranks:
            self._close(rank)
        self._history = history
        self._usual_ns.clear()
        self._open.clear()
        self._ranks = [_Rank(unit.labels) for unit in history.units]

    def feed(
        self,
        number: int,
        facts: Sequence[StepFacts],
        excesses_ns: Sequence[float] | None,
        others: int,
    ) -> None:
        """One step of all ranks. *others*: how many ranks of the whole job wait for one.

        *excesses_ns*: None where something in the step is unusual.
        """
        if self._history.is_at_stride:
            self._usual_ns.clear()
        self._end_stalls(number, facts, others)
        for rank in self._ranks:
            if rank.verdict is not None:
                self._close_overdue(rank, rank.stalls[rank.verdict.phase], number)
        for i, phase, excess_ns in self._stalls(facts, excesses_ns):
            new = _Stall(number, facts[i].took_ns - excess_ns)
            stall = self._open.setdefault((i, phase), new)
            if number != stall.last + 1:
                stall.waited_ns += _waited_ns(i, facts)
            stall.add(number, facts[i].ended_ns, excess_ns)

    def _end_stalls(self, number: int, facts: Sequence[StepFacts], others: int) -> None:
        for (i, phase), stall in [*self._open.items()]:
            if number == stall.last + 1:
                # What comes behind the last wait of a step, the others wait for in the next one.
                stall.waited_ns += _waited_ns(i, facts)
            # Each collection of garbage is one by itself.
            if number > stall.last + (0 if phase == GARBAGE else limits.RECURS_APART):
                del self._open[i, phase]
                if stall.is_one(phase):
                    self._append(self._ranks[i], phase, stall, others)

    def _stalls(
        self, facts: Sequence[StepFacts], excesses_ns: Sequence[float] | None
    ) -> Iterator[tuple[int, str, float]]:
        """Of each rank that stalls in this step: its place, the phase, and for how long."""
        left_out = self._history.window.left_out
        if excesses_ns is None:
            odd = [i for i, each in enumerate(facts) if each.unusual and not each.garbage_ns]
            if len(odd) > limits.UNUSUAL * len(facts):
                return
            all_ns = works_ns(columns_of(facts), left_out)
            for i in odd:
                all_ns[i] = round(median(all_ns))
            excesses_ns = excesses(all_ns)
        collected_ns = sum([each.garbage_ns for each in facts])
        for i, (each, excess_ns) in enumerate(zip(facts, excesses_ns, strict=True)):
            if each.garbage_ns:
                # By the mean of the others: where all collect as much in turn, that evens out.
                mean_ns = (collected_ns - each.garbage_ns) / (len(facts) - 1)
                # While the rank waits itself, its collection keeps no other rank waiting.
                more_ns = min(each.garbage_ns - mean_ns, excess_ns)
                if more_ns > limits.EXCESS_NS:
                    yield i, GARBAGE, more_ns
                continue
            more_ns = self._beyond_usual_ns(i, excess_ns, each.took_ns - excess_ns)
            if more_ns:
                yield i, _phase(facts, i, more_ns, left_out), more_ns

    def _beyond_usual_ns(self, i: int, excess_ns: float, step_ns: float) -> float:
        """How far this excess of a rank is above what is usual for it; 0 where it is usual."""
        least_ns = limits.RECURS_PART * step_ns
        if excess_ns <= least_ns or len(self._history) < limits.RECURS_LEAST_USUAL:
            return 0.0
        if i not in self._usual_ns:
            usual_ns = self._history.excess_ns(i, limits.LENGTHS[0])
            self._usual_ns[i] = max(median(usual_ns), 0.0), spread(usual_ns)
        usual, varies = self._usual_ns[i]
        more_ns = excess_ns - usual
        return more_ns if more_ns > max(least_ns, limits.RECURS_OF_USUAL * varies) else 0.0

    def _append(self, rank: _Rank, phase: str, stall: _Stall, others: int) -> None:
        stalls = rank.stalls.setdefault(phase, [])
        stalls.append(stall)
        del stalls[: -limits.RECURS_SHOWN]
        before = rank.verdict
        if before is None:
            stalls = stalls[-limits.RECURS_REGULAR :]
            if self._recur(rank, phase, stalls) and _cost(stalls) > limits.RECURS_COST:
                self._charge(rank, sum([each.excess_ns for each in stalls]), others)
                rank.verdict = _verdict(rank, phase, stalls, others)
                self._changes.append(Change(rank.verdict, True))
        elif before.phase == phase:
            goes_on = _is_regular(stalls, limits.RECURS_ALIKE_STILL)
            if not goes_on or _cost(stalls) < limits.RECURS_COST_STILL:
                self._close(rank)
                return
            self._charge(rank, stall.excess_ns, others)
            verdict = _verdict(rank, phase, stalls, others)
            rank.verdict = verdict._replace(since_ns=before.since_ns, step=before.step)

    def _recur(self, rank: _Rank, phase: str, stalls: Sequence[_Stall]) -> bool:
        """Whether the last stalls of this rank are no chance, and hardly any other rank's."""
        if len(stalls) < limits.RECURS_REGULAR or not _is_regular(stalls, limits.RECURS_ALIKE):
            return False
        since, own_ns = stalls[0].number, _sum_ns(stalls[1:])
        several = [self._ranks[at] for at in some_of(len(self._ranks))]
        others_ns = [
            _sum_ns([stall for stall in each.stalls.get(phase, ()) if stall.number > since])
            for each in several
            if each is not rank
        ]
        return median(others_ns) <= limits.RECURS_OF_OTHERS * own_ns

    # -- the verdicts

    def _charge(self, rank: _Rank, excess_ns: float, others: int) -> None:
        more_s = excess_ns / 1e9 * others
        rank.lost_s += more_s
        self.lost_s[rank.labels] = self.lost_s.get(rank.labels, 0.0) + more_s

    def _close_overdue(self, rank: _Rank, stalls: Sequence[_Stall], number: int) -> None:
        longest = max(later.number - earlier.number for earlier, later in pairwise(stalls))
        if number - stalls[-1].number > limits.RECURS_OVERDUE * longest:
            self._close(rank, stalls[-1])

    def _close(self, rank: _Rank, last: _Stall | None = None) -> None:
        """*last*: no stall came after it."""
        if rank.verdict is not None:
            until_ns = 0 if last is None else last.ended_ns
            self._changes.append(Change(rank.verdict._replace(until_ns=until_ns), False))
            rank.stalls.clear()
            rank.verdict, rank.lost_s = None, 0.0

    def present(self) -> list[Verdict]:
        """The open verdicts, with the figures of the last stall."""
        return [rank.verdict for rank in self._ranks if rank.verdict is not None]

    def poll(self) -> list[Change]:
        """What has changed since the last poll."""
        changes, self._changes = self._changes, []
        return changes


def _waited_ns(i: int, facts: Sequence[StepFacts]) -> float:
    """How long the typical rank other than *i* waited in this step."""
    return median(without([each.wait_ns for each in facts], i))


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
    """Their mean distance, in steps."""
    return (stalls[-1].number - stalls[0].number) / (len(stalls) - 1)


def _is_regular(stalls: Sequence[_Stall], most: float) -> bool:
    """Whether the standard deviation of their distances is at most this share of the mean.

    Steps are whole: what comes every 5.5 steps has distances of 5 and 6.
    """
    mean = _every(stalls)
    gaps = [later.number - earlier.number for earlier, later in pairwise(stalls)]
    varies = (sum([(gap - mean) ** 2 for gap in gaps]) / len(gaps)) ** 0.5
    return mean >= limits.RECURS_LEAST_EVERY and varies <= max(most * mean, 0.5)


def _cost(stalls: Sequence[_Stall]) -> float:
    """The share of the time between the first and the last one that they took."""
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
    lose = "the other ranks together lose" if others > 1 else "the other rank loses"
    sentence = (
        f"{rank_name(rank.labels)} stalls in {phase_in_words(phase)} about every "
        f"{_every(stalls):.0f} steps: it needs {duration(stall_s)} longer than the others, where "
        f"a step takes {duration(step_s)}; {lose} {_cost(stalls) * others:.2g} s each second. "
        f"{COLLECT_TOGETHER if phase == GARBAGE else _ADVICE}"
    )
    first, last = stalls[0], stalls[-1]
    return Verdict("recurring", rank.labels, phase, sentence, evidence, last.number, first.ended_ns)
