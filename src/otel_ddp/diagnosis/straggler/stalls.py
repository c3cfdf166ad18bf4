"""The stalls of one rank: what is one, whether they recur and after what, and what they cost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from otel_ddp.diagnosis.medians import excesses, median, without
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.vocabulary.words import WORK_PHASES


class Event(NamedTuple):
    """What the program did last that ordinary steps do not have, such as an evaluation."""

    word: str = ""
    times: int = 0
    """How many of these there were so far."""
    number: int = 0
    """The step that it was in."""


class Total(NamedTuple):
    """Summed up over all stalls of a rank in one phase."""

    excess_ns: float = 0.0
    square: float = 0.0
    """The sum of their squares."""

    def plus(self, excess_ns: float) -> Total:
        """With one more."""
        return Total(self.excess_ns + abs(excess_ns), self.square + excess_ns**2)


class Stall(NamedTuple):
    """One step, or several that follow each other closely."""

    number: int
    """Of its first step."""
    steps: int
    ended_ns: int
    excess_ns: float
    step_ns: float
    """What a step would have taken without it."""
    after: Event
    """What it followed at once; empty: nothing known."""
    others: Total
    """What the typical other rank had so far in this phase, or of garbage."""


# -- what is one


class UsualExcess:
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
        usual, spread, since = self._known
        if self._steps - since >= limits.RECURS_LEARNS:
            usual = median(self._last_ns)
            spread = median([abs(each - usual) for each in self._last_ns])
            self._known = usual, spread, self._steps
        return usual, spread


class Burst:
    """Steps of one rank that are far longer than usual, and follow each other closely."""

    def __init__(self, number: int, after: Event) -> None:
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
        self._waited_ns += waited_ns(i, facts)
        columns = zip(*[each.phases_ns for each in facts], strict=True)
        for at, (word, column) in enumerate(zip(WORK_PHASES, columns, strict=True)):
            if at not in not_compared:
                self._by_phase[word] += round(excesses(column)[i])

    def follow(self, number: int, i: int, facts: Sequence[StepFacts]) -> None:
        """A usual step: the others wait in it for what came after their last wait."""
        if number == self.last + 1:
            self._waited_ns += waited_ns(i, facts)

    def phase(self) -> str:
        """The phase that holds most of it."""
        phase, longest_ns = self._by_phase.most_common(1)[0]
        return phase if longest_ns >= limits.RECURS_MOST_OF * self._excess_ns else "mixed"

    def stall(self, others: Total) -> Stall | None:
        """None where it is less than a stall, or the others have not waited for it."""
        step_ns = self._step_ns / self._steps
        least_ns = max(limits.RECURS_OF_STEP * step_ns, limits.RECURS_SHORTEST_NS)
        if self._excess_ns <= least_ns or self._waited_ns < limits.RECURS_WAITED * self._excess_ns:
            return None
        return Stall(
            *(self.number, self._steps, self._ended_ns, self._excess_ns, step_ns),
            *(self._after, others),
        )


def waited_ns(i: int, facts: Sequence[StepFacts]) -> float:
    """How long the typical rank other than *i* waited in this step."""
    return median(without([each.wait_ns for each in facts], i))


# -- whether they recur


class Trail:
    """The last stalls of one rank in one phase."""

    def __init__(self) -> None:
        self._stalls: deque[Stall] = deque(maxlen=limits.RECURS_KEPT)
        self.total = Total()

    def append(self, stall: Stall) -> None:
        """One more."""
        self._stalls.append(stall)
        self.total = self.total.plus(stall.excess_ns)

    def clear(self) -> None:
        """Forget them, but for their total, which others are compared with."""
        self._stalls.clear()

    def last(self, stalls: int) -> list[Stall]:
        """The last ones, oldest first."""
        return list(islice(self._stalls, max(len(self._stalls) - stalls, 0), None))

    def recurring(self) -> list[Stall]:
        """The last stalls, where these are no chance; else none."""
        for gaps, most in limits.RECURS_ALIKE:
            stalls = self.last(gaps + 1)
            alone = _of_others(stalls) <= limits.RECURS_OF_OTHERS_REGULAR
            if len(stalls) > gaps and alone and _is_regular(stalls, most):
                return stalls
        stalls = self.last(limits.RECURS_KEPT)
        alone = _of_others(stalls) <= limits.RECURS_OF_OTHERS
        return stalls if alone and _sigmas(stalls) > limits.SIGMAS else []

    def goes_on(self, stalls: Sequence[Stall]) -> bool:
        """Whether they still are no chance. *stalls*: the last ones."""
        if _is_regular(stalls, limits.RECURS_ALIKE_STILL):
            return True
        return _sigmas(self.last(limits.RECURS_KEPT)) > limits.SIGMAS / 2


def _is_regular(stalls: Sequence[Stall], most: float) -> bool:
    """Whether they come every so many steps, or after every so many of the same events."""
    if every(stalls) < limits.RECURS_LEAST_EVERY:
        return False
    word = after(stalls)
    times = [each.after.times for each in stalls if word and each.after.word == word]
    return _varies([each.number for each in stalls]) <= most or (
        bool(times) and _varies(times) <= most
    )


def _sigmas(stalls: Sequence[Stall]) -> float:
    """How far above chance it is that this rank has more of them than the typical other one."""
    own, others = _own(stalls), _others(stalls)
    return float((own.excess_ns - others.excess_ns) / (own.square + others.square or 1.0) ** 0.5)


def after(stalls: Sequence[Stall]) -> str:
    """What nearly all of them have followed; empty where that is nothing, or not the same."""
    ((word, times),) = Counter(each.after.word for each in stalls).most_common(1)
    return word if times >= limits.RECURS_FOLLOWS * len(stalls) else ""


def every(stalls: Sequence[Stall]) -> float:
    """Their mean distance, in steps."""
    return (stalls[-1].number - stalls[0].number) / (len(stalls) - 1)


def longest_apart(stalls: Sequence[Stall]) -> int:
    """Their longest distance, in steps."""
    return max(later.number - earlier.number for earlier, later in pairwise(stalls))


def cost(stalls: Sequence[Stall]) -> float:
    """The share of the time between the first and the last one that they took."""
    return _own(stalls).excess_ns / max(stalls[-1].ended_ns - stalls[0].ended_ns, 1)


def _of_others(stalls: Sequence[Stall]) -> float:
    """What the typical other rank had meanwhile, in other steps, as a share of it."""
    return _others(stalls).excess_ns / max(_own(stalls).excess_ns, 1.0)


def _own(stalls: Sequence[Stall]) -> Total:
    excesses_ns = [each.excess_ns for each in stalls[1:]]
    return Total(sum(excesses_ns), sum([each**2 for each in excesses_ns]))


def _others(stalls: Sequence[Stall]) -> Total:
    before, now = stalls[0].others, stalls[-1].others
    return Total(now.excess_ns - before.excess_ns, now.square - before.square)


def _varies(places: Sequence[int]) -> float:
    """The standard deviation of their distances, as a share of the mean."""
    mean = (places[-1] - places[0]) / (len(places) - 1)
    gaps = [later - earlier for earlier, later in pairwise(places)]
    return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)
