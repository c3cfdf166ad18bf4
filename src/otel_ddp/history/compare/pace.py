"""Tells a phase that has changed from a machine that has another pace, by one run on each side.

Where other work shares a machine, all phases of a run are slower than those of the next one, by
several percent. The fast steps of a run tell what a phase costs beside the others: then nothing
else disturbs, and from run to run that changes by 0.6 % only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from otel_ddp.history.compare import blocks

# Of each block, the fast steps: so large a part of it.
_FAST = 0.25
_BLOCKS = 48
# Of the work of a step: a smaller phase reads and writes more than it computes, or the other way
# round, and follows the pace otherwise than the rest does. What is left must be as large.
_LEAST_SHARE = 0.2
# No machine's pace does so much to one phase: what has changed by more is no measure for others.
_MOST_BY_PACE = 1.5
# Where all other work takes 10 % longer, a phase that has not changed takes 5 % to 10 % longer.
_FOLLOWS = (0.5, 1.0)
# By so much the fast steps of equal runs differ beside each other, one standard deviation.
_EQUAL_RUNS = 0.006
# What a damaged history brings must not end the comparison.
_LARGEST = 700.0

Phases = Mapping[str, Sequence[float]]


class Beside(NamedTuple):
    """How a phase has changed beside the other work of a step, as shares of what it was."""

    phase: str
    change: float
    low: float
    """The change lies between these, with a confidence of 99 %."""
    high: float
    p: float
    """Corrected for the number of phases that were looked at."""


def most_changed(first: Phases, second: Phases) -> Beside | None:
    """The phase that changed most, by chance or not; *first* and *second*: seconds of each step.

    Only one: what is slower than the rest makes the rest look faster. None if no phase is large
    enough, or the steps are too few.
    """
    if any(len(steps) < _BLOCKS for run in (first, second) for steps in run.values()):
        return None
    found = [each for phase in first if (each := _beside(phase, first, second)) is not None]
    if not found:
        return None
    # As logarithms: half as much is as far away as twice as much.
    most = max(found, key=lambda each: abs(math.log1p(each.change)))
    return most._replace(p=min(most.p * len(found), 1.0))


def _beside(phase: str, first: Phases, second: Phases) -> Beside | None:
    rest = [each for each in first if each != phase and _may_be_pace(first[each], second[each])]
    for run in (first, second):
        work_s = sum(map(sum, run.values()))
        least_s = min(sum(run[phase]), sum(sum(run[each]) for each in rest))
        if not least_s >= _LEAST_SHARE * work_s:
            return None
    fast, other = _fast(phase, rest, first), _fast(phase, rest, second)
    if not all(0 < seconds < math.inf for pair in (*fast, *other) for seconds in pair):
        return None
    tests = [
        blocks.of_means(_beside_each(fast, follows), _beside_each(other, follows), _EQUAL_RUNS)
        for follows in _FOLLOWS
    ]
    apart = [each.after - each.before for each in tests]
    # A change that may be one in either direction is none.
    p = 1.0 if min(apart) < 0 < max(apart) else max(each.p for each in tests)
    low, high = min(each.low for each in tests), max(each.high for each in tests)
    return Beside(phase, _as_share(fmean(apart)), _as_share(low), _as_share(high), p)


def _as_share(logarithm: float) -> float:
    return math.expm1(min(logarithm, _LARGEST))


def _may_be_pace(first: Sequence[float], second: Sequence[float]) -> bool:
    few, many = sorted((fmean(first), fmean(second)))
    return many <= _MOST_BY_PACE * few


def _fast(phase: str, rest: Sequence[str], run: Phases) -> list[tuple[float, float]]:
    """Of each block: the phase in its fast steps, and the others in theirs."""

    def of_blocks(word: str) -> list[float]:
        return [_mean_of_fast(block) for block in blocks.split(run[word], _BLOCKS)]

    others = zip(*map(of_blocks, rest), strict=True)
    return list(zip(of_blocks(phase), map(sum, others), strict=True))


def _beside_each(fast: Sequence[tuple[float, float]], follows: float) -> list[float]:
    return [math.log(own) - follows * math.log(rest) for own, rest in fast]


def _mean_of_fast(steps: Sequence[float]) -> float:
    return fmean(sorted(steps)[: math.ceil(_FAST * len(steps))])
