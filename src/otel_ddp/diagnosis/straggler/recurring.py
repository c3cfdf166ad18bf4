"""Finds ranks that stall in one phase again and again, or by their collections of garbage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.diagnosis.medians import excesses, median, spread, without
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, duration, phase_in_words, rank_name, recurs
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import some_of
from otel_ddp.diagnosis.straggler.window import ExcessHistory, Window, works_ns
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import GARBAGE, WORK_PHASES

_ADVICE = {
    "data": "Look at what its loader does so often: opens a file or a shard, fills a buffer, "
    "starts workers.",
    "other": "Look at what this rank alone does so often between the phases: logging, saving, "
    'evaluation; say phase("checkpoint") or phase("eval") where it is one.',
    GARBAGE: COLLECT_TOGETHER,
}
_USUAL_ADVICE = "Look at what this rank alone does so often."


class _Event(NamedTuple):
    """An evaluation, a checkpoint or a compilation."""

    word: str = ""
    times: int = 0
    """How many of these there were so far."""
    number: int = 0
    """The step that it was in."""


_NONE = _Event()


class _Stall:
    """One step, or several that follow each other closely."""

    def __init__(self, number: int, step_ns: float, after: _Event) -> None:
        """*number*: of its first step. *step_ns*: what that would have taken without it.

        *after*: the event that it follows at once.
        """
        self.number = self.last = number
        self.step_ns = step_ns
        self.after = after
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
        self.since = -1
        """Stalls up to this step belong to a verdict that is over."""
        self.verdict: Verdict | None = None
        self.lost_s = 0.0
        """What the others have lost since it was opened."""

    def last(self, phase: str, most: int = limits.RECURS_KEPT) -> list[_Stall]:
        """The last ones since the last verdict, oldest first."""
        return [each for each in self.stalls[phase] if each.number > self.since][-most:]


class RecurringStalls:
    """The ranks of one run. Fed with each step of all ranks, unusual ones too."""

    def __init__(self) -> None:
        self._history = ExcessHistory(Window())
        self._ranks: list[_Rank] = []
        # By place of a rank: its usual excess, and how much that varies. Since the last stride.
        self._usual_ns: dict[int, tuple[float, float]] = {}
        # By place of a rank and phase: those that may go on.
        self._open: dict[tuple[int, str], _Stall] = {}
        self._event = _NONE
        self._events = Counter[str]()
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
        self._event = _NONE
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
                self._close_overdue(rank, rank.verdict.phase, number)
        for i, phase, excess_ns in self._stalls(facts, excesses_ns):
            is_near = number <= self._event.number + limits.RECURS_APART
            after = self._event if is_near else _NONE
            new = _Stall(number, facts[i].took_ns - excess_ns, after)
            stall = self._open.setdefault((i, phase), new)
            if number != stall.last + 1:
                stall.waited_ns += _waited_ns(i, facts)
            stall.add(number, facts[i].ended_ns, excess_ns)
        if excesses_ns is None and (words := {word for each in facts for word in each.unusual_ns}):
            word = min(words)
            self._events[word] += 1
            self._event = _Event(word, self._events[word], number)

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
        del stalls[: -limits.RECURS_KEPT]
        if rank.verdict is None:
            stalls = self._recurring(rank, phase)
            if stalls and _cost(stalls) > limits.RECURS_COST:
                self._charge(rank, sum([each.excess_ns for each in stalls]), others)
                rank.verdict = _verdict(rank, phase, stalls, others)
                self._changes.append(Change(rank.verdict, True))
        elif rank.verdict.phase == phase:
            self._continue(rank, rank.verdict, stall, others)

    def _continue(self, rank: _Rank, before: Verdict, stall: _Stall, others: int) -> None:
        """One more stall."""
        stalls = rank.last(before.phase, limits.RECURS_SHOWN)
        goes_on = (
            _is_regular(stalls, limits.RECURS_ALIKE_STILL)
            or self._sigmas(rank, before.phase) > limits.SIGMAS / 2
        )
        if not goes_on or _cost(stalls) < limits.RECURS_COST_STILL:
            self._close(rank)
            return
        self._charge(rank, stall.excess_ns, others)
        verdict = _verdict(rank, before.phase, stalls, others)
        rank.verdict = verdict._replace(since_ns=before.since_ns, step=before.step)

    # -- whether they recur

    def _recurring(self, rank: _Rank, phase: str) -> list[_Stall]:
        """The last stalls, where these are no chance; else none."""
        stalls = rank.last(phase)
        regular = stalls[-limits.RECURS_REGULAR :]
        if len(regular) == limits.RECURS_REGULAR and _is_regular(regular, limits.RECURS_ALIKE):
            others_ns, _ = self._others(rank, phase, regular[0].number)
            own_ns, _ = _sums(regular[1:])
            if others_ns <= limits.RECURS_OF_OTHERS_REGULAR * own_ns:
                return regular
        return stalls if self._sigmas(rank, phase) > limits.SIGMAS else []

    def _sigmas(self, rank: _Rank, phase: str) -> float:
        """How far above chance it is that this rank has more of them than the typical other one.

        0 where that one has more than half as much.
        """
        first, *stalls = rank.last(phase)
        (own_ns, own_square), others = _sums(stalls), self._others(rank, phase, first.number)
        if others[0] > limits.RECURS_OF_OTHERS * own_ns:
            return 0.0
        return float((own_ns - others[0]) / (own_square + others[1] or 1.0) ** 0.5)

    def _others(self, rank: _Rank, phase: str, since: int) -> tuple[float, float]:
        """The sums of the typical other rank, of its stalls after this step."""
        several = [self._ranks[at] for at in some_of(len(self._ranks))]
        sums = [
            _sums([stall for stall in each.stalls.get(phase, ()) if stall.number > since])
            for each in several
            if each is not rank
        ]
        sums_ns, squares = zip(*sums, strict=True)
        return median(sums_ns), median(squares)

    # -- the verdicts

    def _charge(self, rank: _Rank, excess_ns: float, others: int) -> None:
        more_s = excess_ns / 1e9 * others
        rank.lost_s += more_s
        self.lost_s[rank.labels] = self.lost_s.get(rank.labels, 0.0) + more_s

    def _close_overdue(self, rank: _Rank, phase: str, number: int) -> None:
        stalls = rank.last(phase, limits.RECURS_SHOWN)
        longest = max(later.number - earlier.number for earlier, later in pairwise(stalls))
        if number - stalls[-1].number > limits.RECURS_OVERDUE * longest:
            self._close(rank, stalls[-1])

    def _close(self, rank: _Rank, last: _Stall | None = None) -> None:
        """*last*: no stall came after it."""
        if rank.verdict is not None:
            until_ns = 0 if last is None else last.ended_ns
            self._changes.append(Change(rank.verdict._replace(until_ns=until_ns), False))
            rank.since = rank.stalls[rank.verdict.phase][-1].number
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


def _sums(stalls: Sequence[_Stall]) -> tuple[float, float]:
    """Of their lengths, and of the squares of these."""
    excesses_ns = [each.excess_ns for each in stalls]
    return sum(excesses_ns), sum([ns**2 for ns in excesses_ns])


def _every(stalls: Sequence[_Stall]) -> float:
    """Their mean distance, in steps."""
    return (stalls[-1].number - stalls[0].number) / (len(stalls) - 1)


def _is_regular(stalls: Sequence[_Stall], most: float) -> bool:
    """Whether they come every so many steps, or after every so many of the same events."""
    if _every(stalls) < limits.RECURS_LEAST_EVERY:
        return False
    word = _after(stalls)
    times = [each.after.times for each in stalls if word and each.after.word == word]
    return _varies([each.number for each in stalls]) <= most or (
        bool(times) and _varies(times) <= most
    )


def _after(stalls: Sequence[_Stall]) -> str:
    """The event that nearly all of them follow; empty if there is none."""
    ((word, times),) = Counter(each.after.word for each in stalls).most_common(1)
    return word if times >= limits.RECURS_FOLLOWS * len(stalls) else ""


def _varies(places: Sequence[int]) -> float:
    """The standard deviation of their distances, as a share of the mean."""
    mean = (places[-1] - places[0]) / (len(places) - 1)
    gaps = [later - earlier for earlier, later in pairwise(places)]
    return float((sum([(gap - mean) ** 2 for gap in gaps]) / len(gaps)) ** 0.5 / mean)


def _cost(stalls: Sequence[_Stall]) -> float:
    """The share of the time between the first and the last one that they took."""
    own_ns, _ = _sums(stalls[1:])
    return own_ns / max(stalls[-1].ended_ns - stalls[0].ended_ns, 1)


def _verdict(rank: _Rank, phase: str, stalls: Sequence[_Stall], others: int) -> Verdict:
    stall_s = median([each.excess_ns for each in stalls]) / 1e9
    step_s = median([each.step_ns for each in stalls]) / 1e9
    steps = median([each.last + 1 - each.number for each in stalls])
    evidence: dict[str, Any] = {
        "recurs_every": round(_every(stalls), 1),
        "stall_s": round(stall_s, 6),
        "stall_steps": round(steps),
        "step_s": round(step_s, 6),
        "stalls": len(stalls),
        "lost_per_s": round(_cost(stalls) * others, 4),
        "lost_s": round(rank.lost_s, 3),
    }
    if event := _after(stalls):
        evidence["recurs_after"] = event
    longer = f" in {steps:.0f} steps" if steps > 1 else ""
    lose = "the other ranks together lose" if others > 1 else "the other rank loses"
    sentence = (
        f"{rank_name(rank.labels)} stalls in {phase_in_words(phase)} {recurs(evidence)}: it needs "
        f"{duration(stall_s)} longer than the others{longer}, where a step takes "
        f"{duration(step_s)}; {lose} {_cost(stalls) * others:.2g} s each second. "
        f"{_ADVICE.get(phase, _USUAL_ADVICE)}"
    )
    first, last = stalls[0], stalls[-1]
    return Verdict("recurring", rank.labels, phase, sentence, evidence, last.number, first.ended_ns)
