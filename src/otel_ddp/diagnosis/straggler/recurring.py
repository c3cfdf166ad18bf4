"""Finds ranks that stall in one phase again and again, or by their collections of garbage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from otel_ddp.diagnosis.medians import excesses, median
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, duration, phase_in_words, rank_name, recurs
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.stalls import (
    Burst,
    Event,
    Stall,
    Total,
    Trail,
    UsualExcess,
    after,
    cost,
    every,
    longest_apart,
    waited_ns,
)
from otel_ddp.diagnosis.straggler.window import works_ns
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import GARBAGE

_ADVICE = {
    "data": "Look at what its loader does so often: opens a file or a shard, fills a buffer, "
    "starts workers.",
    "other": "Look at what this rank alone does so often between the phases: logging, saving, "
    'evaluation; say phase("checkpoint") or phase("eval") where it is one.',
    GARBAGE: COLLECT_TOGETHER,
}


class _Case(NamedTuple):
    """An open verdict on a rank."""

    verdict: Verdict
    trail: Trail
    many: int
    """So many stalls say whether it goes on."""
    lost_s: float


class _Rank:
    """One rank."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.usual = UsualExcess()
        self.burst: Burst | None = None
        self.trails: dict[str, Trail] = {}
        # What the others had more to collect, where these had.
        self.less_garbage = Total()
        self.case: _Case | None = None


class RecurringStalls:
    """The ranks of one run. Fed with each step of all ranks, unusual ones too."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._not_compared: Sequence[int] = ()
        self._event = Event()
        self._events: Counter[str] = Counter()
        # By index of a rank: its collection of garbage in the last step, and the others' wait then.
        self._collected: dict[int, tuple[Stall, float]] = {}
        self._changes: list[Change] = []
        self.lost_s: dict[Labels, float] = {}
        """What the other ranks of the job have waited in recurring stalls, by rank."""

    def start_again(self, ranks: Sequence[Labels], not_compared: Sequence[int]) -> None:
        """From now on these ranks are compared, without these phases."""
        for rank in self._ranks:
            self._close(rank)
        self._ranks, self._not_compared = [_Rank(labels) for labels in ranks], not_compared
        self._event = Event()
        self._collected.clear()

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
        if self._collected:
            self._end_collections(facts, others)
        if is_unusual := excesses_ns is None:
            excesses_ns = self._feed_unusual(number, facts)
        for i, (rank, excess_ns) in enumerate(zip(self._ranks, excesses_ns, strict=False)):
            if rank.case is not None:
                self._close_overdue(rank, rank.case, number)
            if rank.burst is not None and number > rank.burst.last + limits.RECURS_APART:
                self._end(rank, rank.burst, others)
            more_ns = rank.usual.beyond_ns(excess_ns, facts[i].took_ns - max(excess_ns, 0.0))
            if more_ns:
                rank.burst = rank.burst or Burst(number, self._just_before(number))
                rank.burst.append(number, i, facts, more_ns, self._not_compared)
            elif rank.burst is not None:
                rank.burst.follow(number, i, facts)
        if is_unusual and (words := {word for each in facts for word in each.unusual_ns}):
            word = min(words)
            self._events[word] += 1
            self._event = Event(word, self._events[word], number)

    def _just_before(self, number: int) -> Event:
        is_near = number <= self._event.number + limits.RECURS_APART
        return self._event if is_near else Event()

    def _feed_unusual(self, number: int, facts: Sequence[StepFacts]) -> Sequence[float]:
        """Looks at the collections of garbage; the excesses without these.

        Empty where too many ranks have something else that is unusual.
        """
        odd = [i for i, each in enumerate(facts) if each.unusual and not each.garbage_ns]
        if len(odd) > limits.UNUSUAL * len(facts):
            return ()
        all_ns = works_ns(columns_of(facts), self._not_compared)
        for i in odd:
            all_ns[i] = round(median(all_ns))
        collected_ns = [each.garbage_ns for each in facts]
        if any(collected_ns):
            self._feed_garbage(number, facts, excesses(all_ns))
        return excesses([ns - more for ns, more in zip(all_ns, collected_ns, strict=True)])

    def _feed_garbage(
        self, number: int, facts: Sequence[StepFacts], excesses_ns: Sequence[float]
    ) -> None:
        all_ns = sum([each.garbage_ns for each in facts])
        for i, (rank, excess_ns) in enumerate(zip(self._ranks, excesses_ns, strict=True)):
            own_ns = facts[i].garbage_ns
            # By the mean of the others: where all collect as much in turn, that evens out.
            more_ns = own_ns - (all_ns - own_ns) / (len(facts) - 1)
            if more_ns < 0:
                rank.less_garbage = rank.less_garbage.plus(more_ns)
                continue
            # While the rank waits itself, its collection keeps no other rank waiting.
            more_ns = min(more_ns, excess_ns)
            if more_ns > limits.EXCESS_NS:
                stall = Stall(
                    *(number, 1, facts[i].ended_ns, more_ns, facts[i].took_ns - more_ns),
                    *(self._just_before(number), rank.less_garbage),
                )
                self._collected[i] = stall, waited_ns(i, facts)

    def _end_collections(self, facts: Sequence[StepFacts], others: int) -> None:
        """*facts*: the step after them."""
        collected, self._collected = self._collected, {}
        for i, (stall, before_ns) in collected.items():
            if before_ns + waited_ns(i, facts) >= limits.RECURS_WAITED * stall.excess_ns:
                self._append(self._ranks[i], GARBAGE, stall, others)

    def _others(self, rank: _Rank, phase: str) -> Total:
        """What the typical other rank had in this phase so far."""
        none = Trail()
        totals = [each.trails.get(phase, none).total for each in self._ranks if each is not rank]
        return Total(*map(median, zip(*totals, strict=True)))

    def _end(self, rank: _Rank, burst: Burst, others: int) -> None:
        rank.burst, phase = None, burst.phase()
        if stall := burst.stall(self._others(rank, phase)):
            self._append(rank, phase, stall, others)

    def _append(self, rank: _Rank, phase: str, stall: Stall, others: int) -> None:
        trail = rank.trails.setdefault(phase, Trail())
        trail.append(stall)
        if rank.case is None:
            self._open(rank, phase, trail, others)
        elif rank.case.trail is trail:
            self._continue(rank, rank.case, others)

    def _open(self, rank: _Rank, phase: str, trail: Trail, others: int) -> None:
        stalls = trail.recurring()
        if not stalls or cost(stalls) <= limits.RECURS_COST:
            return
        lost_s = self._charge(rank, sum(each.excess_ns for each in stalls), others)
        verdict = _verdict(rank.labels, phase, stalls, others, lost_s)
        rank.case = _Case(verdict, trail, max(len(stalls), limits.RECURS_FEWEST), lost_s)
        self._changes.append(Change(verdict, True))

    def _continue(self, rank: _Rank, case: _Case, others: int) -> None:
        """One more stall."""
        before, stalls = case.verdict, case.trail.last(case.many)
        if not case.trail.goes_on(stalls) or cost(stalls) < limits.RECURS_COST_STILL:
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
        stalls = case.trail.last(case.many)
        if number - stalls[-1].number > limits.RECURS_OVERDUE * longest_apart(stalls):
            self._close(rank, stalls[-1].ended_ns)

    def _close(self, rank: _Rank, until_ns: int = 0) -> None:
        if rank.case is not None:
            self._changes.append(Change(rank.case.verdict._replace(until_ns=until_ns), False))
            rank.case = None
            for trail in rank.trails.values():
                trail.clear()

    def present(self) -> list[Verdict]:
        """The open verdicts, with the figures of the last stall."""
        return [rank.case.verdict for rank in self._ranks if rank.case is not None]

    def poll(self) -> list[Change]:
        """What has changed since the last poll."""
        changes, self._changes = self._changes, []
        return changes


def _verdict(
    labels: Labels, phase: str, stalls: Sequence[Stall], others: int, lost_s: float
) -> Verdict:
    stall_s = median([each.excess_ns for each in stalls]) / 1e9
    steps = median([each.steps for each in stalls])
    step_s = median([each.step_ns for each in stalls]) / 1e9
    evidence: dict[str, Any] = {
        "recurs_every": round(every(stalls), 1),
        "stall_s": round(stall_s, 6),
        "stall_steps": round(steps),
        "step_s": round(step_s, 6),
        "stalls": len(stalls),
        "lost_per_s": round(cost(stalls) * others, 4),
        "lost_s": round(lost_s, 3),
    }
    if event := after(stalls):
        evidence["recurs_after"] = event
    longer = f" in {steps:.0f} steps" if steps > 1 else ""
    lose = "the other ranks together lose" if others > 1 else "the other rank loses"
    usual = f"Look at what this rank alone does {'then' if event else 'so often'}."
    sentence = (
        f"{rank_name(labels)} stalls in {phase_in_words(phase)} {recurs(evidence)}: it needs "
        f"{duration(stall_s)} longer than the others{longer}, where a step takes "
        f"{duration(step_s)}; {lose} {cost(stalls) * others:.2g} s each second. "
        f"{_ADVICE.get(phase, usual)}"
    )
    first, last = stalls[0], stalls[-1]
    return Verdict("recurring", labels, phase, sentence, evidence, last.number, first.ended_ns)
