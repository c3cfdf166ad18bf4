"""Finds ranks that stall in one phase again and again, or by their collections of garbage."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.diagnosis.medians import excesses, median, spread, without
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, duration, phase_in_words, rank_name, recurs
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.window import works_ns
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import GARBAGE, WORK_PHASES

_ADVICE = {
    "data": "Look at what its loader does so often: opens a file or a shard, fills a buffer, "
    "starts workers.",
    "other": "Look at what this rank alone does so often between the phases: logging, saving, "
    'evaluation; say phase("checkpoint") or phase("eval") where it is one.',
    GARBAGE: COLLECT_TOGETHER,
}


class _Event(NamedTuple):
    """What the program did last that ordinary steps do not have, such as an evaluation."""

    word: str = ""
    times: int = 0
    """How many of these there were so far."""
    number: int = 0
    """The step that it was in."""


class _Total(NamedTuple):
    """Summed up over all stalls of a rank in one phase."""

    excess_ns: float = 0.0
    square: float = 0.0
    """The sum of their squares."""

    def plus(self, excess_ns: float) -> _Total:
        """With one more."""
        return _Total(self.excess_ns + abs(excess_ns), self.square + excess_ns**2)


class _Stall(NamedTuple):
    """One step, or several that follow each other closely."""

    number: int
    """Of its first step."""
    steps: int
    ended_ns: int
    excess_ns: float
    step_ns: float
    """What a step would have taken without it."""
    after: _Event
    """What it followed at once; empty: nothing known."""
    others: _Total
    """What the typical other rank had so far in this phase, or of garbage."""


# -- what is one


class _UsualExcess:
    """What a rank needs longer than the others in most steps, and how much that varies."""

    def __init__(self) -> None:
        self._last_ns: deque[float] = deque(maxlen=limits.RECURS_USUAL)
        self._steps = 0
        # Their median and their spread, and after how many of them that was.
        self._known = (0.0, 0.0, -limits.RECURS_LEARNS)

    def beyond_ns(self, excess_ns: float, step_ns: float) -> float:
        """How far this excess is beyond what is usual; 0 where it is usual.

        *step_ns*: the step without it.
        """
        beyond_ns, least_ns = 0.0, limits.RECURS_PART * step_ns
        if excess_ns > least_ns and self._steps >= limits.RECURS_LEAST_USUAL:
            usual_ns, spread_ns = self._usual()
            # Of a rank that is late in every step, it has to be later than that.
            more_ns = excess_ns - max(usual_ns, 0.0)
            if more_ns > max(least_ns, limits.RECURS_OF_USUAL * spread_ns):
                beyond_ns = more_ns
        self._last_ns.append(excess_ns)
        self._steps += 1
        return beyond_ns

    def _usual(self) -> tuple[float, float]:
        usual, varies, since = self._known
        if self._steps - since >= limits.RECURS_LEARNS:
            usual, varies = median(self._last_ns), spread(self._last_ns)
            self._known = usual, varies, self._steps
        return usual, varies


class _Burst:
    """Steps of one rank that are far longer than usual, and follow each other closely."""

    def __init__(self, number: int, after: _Event) -> None:
        """*number*: of its first step. *after*: what it follows."""
        self.number = self.last = number
        self._after = after
        self._steps = self._ended_ns = 0
        self._excess_ns = self._step_ns = self._waited_ns = 0.0
        self._by_phase: Counter[str] = Counter()

    def append(
        self,
        number: int,
        i: int,
        facts: Sequence[StepFacts],
        excess_ns: float,
        not_compared: Sequence[int],
    ) -> None:
        """One more step, in which rank *i* needed so much longer than usual."""
        self.last, self._ended_ns = number, facts[i].ended_ns
        self._steps += 1
        self._excess_ns += excess_ns
        self._step_ns += facts[i].took_ns - excess_ns
        self._waited_ns += _waited_ns(i, facts)
        columns = zip(*[each.phases_ns for each in facts], strict=True)
        for at, (word, column) in enumerate(zip(WORK_PHASES, columns, strict=True)):
            if at not in not_compared:
                self._by_phase[word] += round(excesses(column)[i])

    def follow(self, number: int, i: int, facts: Sequence[StepFacts]) -> None:
        """A usual step: the others wait in it for what came after their last wait."""
        if number == self.last + 1:
            self._waited_ns += _waited_ns(i, facts)

    def phase(self) -> str:
        """The phase that holds most of it."""
        phase, longest_ns = self._by_phase.most_common(1)[0]
        return phase if longest_ns >= limits.RECURS_MOST_OF * self._excess_ns else "mixed"

    def stall(self, others: _Total) -> _Stall | None:
        """None where it is less than a stall, or the others have not waited for it."""
        step_ns = self._step_ns / self._steps
        least_ns = max(limits.RECURS_OF_STEP * step_ns, limits.RECURS_SHORTEST_NS)
        if self._excess_ns <= least_ns or self._waited_ns < limits.RECURS_WAITED * self._excess_ns:
            return None
        steps, ended_ns = self._steps, self._ended_ns
        return _Stall(self.number, steps, ended_ns, self._excess_ns, step_ns, self._after, others)


def _waited_ns(i: int, facts: Sequence[StepFacts]) -> float:
    """How long the typical rank other than *i* waited in this step."""
    return median(without([each.wait_ns for each in facts], i))


# -- whether they recur


class _Trail:
    """The last stalls of one rank in one phase."""

    def __init__(self) -> None:
        self._stalls: list[_Stall] = []
        self.total = _Total()

    def append(self, stall: _Stall) -> None:
        """One more."""
        self._stalls.append(stall)
        del self._stalls[: -limits.RECURS_KEPT]
        self.total = self.total.plus(stall.excess_ns)

    def clear(self) -> None:
        """Forget them, but for their total, which others are compared with."""
        self._stalls.clear()

    def last(self, stalls: int) -> list[_Stall]:
        """The last ones, oldest first."""
        return self._stalls[-stalls:]

    def recurring(self) -> list[_Stall]:
        """The last stalls, where these are no chance; else none."""
        for gaps, most in limits.RECURS_ALIKE:
            stalls = self.last(gaps + 1)
            alone = _of_others(stalls) <= limits.RECURS_OF_OTHERS_REGULAR
            if len(stalls) > gaps and alone and _is_regular(stalls, most):
                return stalls
        stalls = [*self._stalls]
        alone = _of_others(stalls) <= limits.RECURS_OF_OTHERS
        return stalls if alone and _sigmas(stalls) > limits.SIGMAS else []

    def goes_on(self, stalls: Sequence[_Stall]) -> bool:
        """Whether they still are no chance. *stalls*: the last ones."""
        if _is_regular(stalls, limits.RECURS_ALIKE_STILL):
            return True
        return _sigmas(self._stalls) > limits.SIGMAS / 2


def _is_regular(stalls: Sequence[_Stall], most: float) -> bool:
    """Whether they come every so many steps, or after every so many of the same events."""
    if _every(stalls) < limits.RECURS_LEAST_EVERY:
        return False
    word = _after(stalls)
    times = [each.after.times for each in stalls if word and each.after.word == word]
    return _varies([each.number for each in stalls]) <= most or (
        bool(times) and _varies(times) <= most
    )


def _sigmas(stalls: Sequence[_Stall]) -> float:
    """How far above chance it is that this rank has more of them than the typical other one."""
    own, others = _own(stalls), _others(stalls)
    return float((own.excess_ns - others.excess_ns) / (own.square + others.square or 1.0) ** 0.5)


def _after(stalls: Sequence[_Stall]) -> str:
    """What nearly all of them have followed; empty where that is nothing, or not the same."""
    ((word, times),) = Counter(each.after.word for each in stalls).most_common(1)
    return word if times >= limits.RECURS_FOLLOWS * len(stalls) else ""


def _every(stalls: Sequence[_Stall]) -> float:
    """Their mean distance, in steps."""
    return (stalls[-1].number - stalls[0].number) / (len(stalls) - 1)


def _longest_apart(stalls: Sequence[_Stall]) -> int:
    """Their longest distance, in steps."""
    return max(later.number - earlier.number for earlier, later in pairwise(stalls))


def _cost(stalls: Sequence[_Stall]) -> float:
    """The share of the time between the first and the last one that they took."""
    return _own(stalls).excess_ns / max(stalls[-1].ended_ns - stalls[0].ended_ns, 1)


def _of_others(stalls: Sequence[_Stall]) -> float:
    """What the typical other rank had meanwhile, in other steps, as a share of it."""
    return _others(stalls).excess_ns / max(_own(stalls).excess_ns, 1.0)


def _own(stalls: Sequence[_Stall]) -> _Total:
    excesses_ns = [each.excess_ns for each in stalls[1:]]
    return _Total(sum(excesses_ns), sum([each**2 for each in excesses_ns]))


def _others(stalls: Sequence[_Stall]) -> _Total:
    before, now = stalls[0].others, stalls[-1].others
    return _Total(now.excess_ns - before.excess_ns, now.square - before.square)


def _varies(places: Sequence[int]) -> float:
    """The standard deviation of their distances, as a share of the mean."""
    mean = (places[-1] - places[0]) / (len(places) - 1)
    gaps = [later - earlier for earlier, later in pairwise(places)]
    return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)


# -- the verdicts


class _Case(NamedTuple):
    """An open verdict on a rank."""

    verdict: Verdict
    trail: _Trail
    many: int
    """So many stalls say whether it goes on."""
    lost_s: float


class _Rank:
    """One rank."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.usual = _UsualExcess()
        self.burst: _Burst | None = None
        self.trails: dict[str, _Trail] = {}
        # What the others had more to collect, where these had.
        self.less_garbage = _Total()
        self.case: _Case | None = None


class RecurringStalls:
    """The ranks of one run. Fed with each step of all ranks, unusual ones too."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._not_compared: Sequence[int] = ()
        self._event = _Event()
        self._events: Counter[str] = Counter()
        # By index of a rank: its collection of garbage in the last step, and the others' wait then.
        self._collected: dict[int, tuple[_Stall, float]] = {}
        self._changes: list[Change] = []
        self.lost_s: dict[Labels, float] = {}
        """What the other ranks of the job have waited in recurring stalls, by rank."""

    def start_again(self, ranks: Sequence[Labels], not_compared: Sequence[int]) -> None:
        """From now on these ranks are compared, without these phases."""
        for rank in self._ranks:
            self._close(rank)
        self._ranks, self._not_compared = [_Rank(labels) for labels in ranks], not_compared
        self._event = _Event()
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
                rank.burst = rank.burst or _Burst(number, self._just_before(number))
                rank.burst.append(number, i, facts, more_ns, self._not_compared)
            elif rank.burst is not None:
                rank.burst.follow(number, i, facts)
        if is_unusual and (words := {word for each in facts for word in each.unusual_ns}):
            word = min(words)
            self._events[word] += 1
            self._event = _Event(word, self._events[word], number)

    def _just_before(self, number: int) -> _Event:
        is_near = number <= self._event.number + limits.RECURS_APART
        return self._event if is_near else _Event()

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
                step_ns, after = facts[i].took_ns - more_ns, self._just_before(number)
                ended_ns = facts[i].ended_ns
                stall = _Stall(number, 1, ended_ns, more_ns, step_ns, after, rank.less_garbage)
                self._collected[i] = stall, _waited_ns(i, facts)

    def _end_collections(self, facts: Sequence[StepFacts], others: int) -> None:
        """*facts*: the step after them."""
        collected, self._collected = self._collected, {}
        for i, (stall, before_ns) in collected.items():
            if before_ns + _waited_ns(i, facts) >= limits.RECURS_WAITED * stall.excess_ns:
                self._append(self._ranks[i], GARBAGE, stall, others)

    def _others(self, rank: _Rank, phase: str) -> _Total:
        """What the typical other rank had in this phase so far."""
        none = _Trail()
        totals = [each.trails.get(phase, none).total for each in self._ranks if each is not rank]
        return _Total(*map(median, zip(*totals, strict=True)))

    def _end(self, rank: _Rank, burst: _Burst, others: int) -> None:
        rank.burst, phase = None, burst.phase()
        if stall := burst.stall(self._others(rank, phase)):
            self._append(rank, phase, stall, others)

    def _append(self, rank: _Rank, phase: str, stall: _Stall, others: int) -> None:
        trail = rank.trails.setdefault(phase, _Trail())
        trail.append(stall)
        if rank.case is None:
            self._open(rank, phase, trail, others)
        elif rank.case.trail is trail:
            self._continue(rank, rank.case, others)

    def _open(self, rank: _Rank, phase: str, trail: _Trail, others: int) -> None:
        stalls = trail.recurring()
        if not stalls or _cost(stalls) <= limits.RECURS_COST:
            return
        lost_s = self._charge(rank, sum(each.excess_ns for each in stalls), others)
        verdict = _verdict(rank.labels, phase, stalls, others, lost_s)
        rank.case = _Case(verdict, trail, max(len(stalls), limits.RECURS_FEWEST), lost_s)
        self._changes.append(Change(verdict, True))

    def _continue(self, rank: _Rank, case: _Case, others: int) -> None:
        """One more stall."""
        before, stalls = case.verdict, case.trail.last(case.many)
        if not case.trail.goes_on(stalls) or _cost(stalls) < limits.RECURS_COST_STILL:
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
        if number - stalls[-1].number > limits.RECURS_OVERDUE * _longest_apart(stalls):
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
    labels: Labels, phase: str, stalls: Sequence[_Stall], others: int, lost_s: float
) -> Verdict:
    stall_s = median([each.excess_ns for each in stalls]) / 1e9
    steps = median([each.steps for each in stalls])
    step_s = median([each.step_ns for each in stalls]) / 1e9
    evidence: dict[str, Any] = {
        "recurs_every": round(_every(stalls), 1),
        "stall_s": round(stall_s, 6),
        "stall_steps": round(steps),
        "step_s": round(step_s, 6),
        "stalls": len(stalls),
        "lost_per_s": round(_cost(stalls) * others, 4),
        "lost_s": round(lost_s, 3),
    }
    if event := _after(stalls):
        evidence["recurs_after"] = event
    longer = f" in {steps:.0f} steps" if steps > 1 else ""
    lose = "the other ranks together lose" if others > 1 else "the other rank loses"
    usual = f"Look at what this rank alone does {'then' if event else 'so often'}."
    sentence = (
        f"{rank_name(labels)} stalls in {phase_in_words(phase)} {recurs(evidence)}: it needs "
        f"{duration(stall_s)} longer than the others{longer}, where a step takes "
        f"{duration(step_s)}; {lose} {_cost(stalls) * others:.2g} s each second. "
        f"{_ADVICE.get(phase, usual)}"
    )
    first, last = stalls[0], stalls[-1]
    return Verdict("recurring", labels, phase, sentence, evidence, last.number, first.ended_ns)
