"""What each rank needed for its own work in the last minute: enough to compare ranks of all nodes.

The agent exports it, and the rules in Prometheus compare it: deploy/prometheus/rules/straggler.yml.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Change, Labels
from otel_ddp.vocabulary.words import WORK_PHASES


class WorkTime(NamedTuple):
    """Of one rank, per step; each number is a median, so that no pause moves it."""

    thirds_s: tuple[float, ...]
    """Its work in each third of the steps, the oldest first."""
    rest_s: float
    """What else a step has, in the last third: the rank waits for others in it, or may."""


class WorkTimes(Detector):
    """The ranks of one run. Finds nothing itself."""

    def __init__(self) -> None:
        self.now: Mapping[Labels, WorkTime] = {}
        """Of ranks that make steps, once they have made enough of them."""
        self._ranks: dict[Labels, _Rank] = {}
        # Indices into WORK_PHASES: in these phases a wait for others looks like work.
        self._left_out: tuple[int, ...] = ()
        self._due_ns = 0

    def feed(self, rank: RankState, seen: Observation) -> None:
        labels = rank.labels
        has_others = not rank.is_beside and rank.world_size != 1
        if seen.ended is not None or rank.waits_known is False or not has_others:
            self.forget(labels)
            return
        self._leave_out(rank.own_collectives)
        known = self._ranks.get(labels)
        if known is None or known.began_ns != rank.began_ns:
            known = self._ranks[labels] = _Rank(rank.began_ns)
        if seen.facts:
            known.feed(seen.facts, self._left_out, seen.now_ns)

    def _leave_out(self, phases: Sequence[str]) -> None:
        # If one rank calls collectives there, all do; those that do not yet will.
        more = {at for at, word in enumerate(WORK_PHASES) if word in phases} - {*self._left_out}
        if more:
            self._left_out = (*self._left_out, *sorted(more))
            for each in self._ranks.values():
                each.clear()

    def forget(self, labels: Labels) -> None:
        self._ranks.pop(labels, None)
        self.now = {each: time for each, time in self.now.items() if each != labels}

    def poll(self, now_ns: int) -> list[Change]:
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + limits.WORK_EVERY_NS
            found = {labels: rank.find(now_ns) for labels, rank in self._ranks.items()}
            self.now = {labels: time for labels, time in found.items() if time is not None}
        return []


class _Rank:
    """The last ordinary steps of one process, in columns, and one step before them."""

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self._first = limits.FIRST_STEPS
        self._fed_ns = 0
        self._ended_ns: list[int] = []
        self._work_ns: list[int] = []
        self._rest_ns: list[int] = []

    def clear(self) -> None:
        """Another part of a step counts as work from now on."""
        for column in (self._ended_ns, self._work_ns, self._rest_ns):
            column.clear()

    def feed(self, facts: Sequence[StepFacts], left_out: Sequence[int], now_ns: int) -> None:
        first, self._first = self._first, max(self._first - len(facts), 0)
        usual = [each for each in facts[first:] if not each.unusual]
        if not usual:
            return
        rest_ns = [each.wait_ns for each in usual]
        for at in left_out:
            rest_ns = [ns + each.phases_ns[at] for ns, each in zip(rest_ns, usual, strict=True)]
        self._ended_ns += [each.ended_ns for each in usual]
        self._rest_ns += rest_ns
        self._work_ns += [each.took_ns - ns for each, ns in zip(usual, rest_ns, strict=True)]
        self._fed_ns = now_ns
        if (before := self._window(limits.WORK_MOST) - 1) > 0:
            for column in (self._ended_ns, self._work_ns, self._rest_ns):
                del column[:before]

    def _window(self, fewest: int) -> int:
        """Where the window begins that has so many steps at least: 0 or less until it is full."""
        begins_ns = self._ended_ns[-1] - limits.WORK_WINDOW_NS
        return min(bisect_right(self._ended_ns, begins_ns), len(self._ended_ns) - fewest)

    def _fewest(self) -> int:
        """How many steps it takes: the more, the more they vary."""
        work_ns, rest_ns = (each[-limits.LENGTHS[0] :] for each in (self._work_ns, self._rest_ns))
        middle_ns = median(work_ns)
        # Of a normal distribution, the median distance from the middle is 1/1.48 of its standard
        # deviation; and a median varies 1.25 times as much as a mean does.
        deviation_ns = 1.48 * median([abs(each - middle_ns) for each in work_ns])
        chance_ns = limits.WORK_CHANCE * (middle_ns + median(rest_ns))
        third = (1.25 * deviation_ns / max(chance_ns, 1)) ** 2
        return max(ceil(third) * limits.WINDOWS, limits.LENGTHS[0])

    def find(self, now_ns: int) -> WorkTime | None:
        """None where there are too few steps, or none any more."""
        if not self._ended_ns or (fewest := self._fewest()) > limits.WORK_MOST:
            return None
        if (start := self._window(fewest)) < 1:
            return None
        window_ns = self._ended_ns[-1] - self._ended_ns[start - 1]
        if now_ns - self._fed_ns > window_ns or window_ns > limits.WORK_LONGEST_NS:
            return None
        steps = len(self._ended_ns) - start
        ends = [start + steps * each // limits.WINDOWS for each in range(limits.WINDOWS + 1)]
        return WorkTime(
            tuple(median(self._work_ns[begin:end]) / 1e9 for begin, end in pairwise(ends)),
            median(self._rest_ns[ends[-2] :]) / 1e9,
        )
