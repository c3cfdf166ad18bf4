"""The one statistic of comparisons: how far two means differ, and whether chance explains it.

What is averaged are the means of blocks, as neighbouring steps depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

# A block must be longer than steps depend on each other. How long that is, is not known: so the
# test is done with short and with long blocks, and the larger p counts.
_BLOCKS = (24, 12)
_FEWEST_STEPS = 40
# Logged values are few, and further from each other.
_FEWEST_VALUES = 5
_FEWEST_RUNS = 4
# Of the blocks, the lowest and the highest count as much as their neighbours.
_TRIMMED = 0.1
# Above it, a block resembles the one before by more than chance.
_WANDERS = 0.5
# Runs of the same code, on a machine that others share, differed by 4 % to 6 % from each other, and
# their blocks by 3 %. So the variance between runs is that between blocks, times this.
_RUNS_VARY = 3.0
# A step this far from the median, in units of the usual distance, is a pause and no step...
_FAR = 10.0
# ... unless they are many: then they belong to the training.
_MOST_PAUSES = 0.03
_CONFIDENCE = 0.99
# Of an integral: p is then right to a thousandth of itself.
_PANELS = 200


class Difference(NamedTuple):
    """Of a second series from a first one."""

    before: float
    after: float
    low: float
    """The difference lies between these, with a confidence of 99 %."""
    high: float
    p: float
    """How probable a difference of this size is if there is none."""
    block: int
    """How many values the longest block has that was used; 0: whole runs were compared."""


class _Centre(NamedTuple):
    mean: float
    variance: float
    freedom: float


def of_steps(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The difference of the steps of two runs; None if there are too few.

    A machine has another pace in each run, and that counts as chance too. By how much its pace may
    differ is told by how it changes within these.
    """
    if min(len(first), len(second)) < _FEWEST_STEPS:
        return None
    return _of_blocks(first, second, _BLOCKS, _RUNS_VARY)


def of_values(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The same of logged values; a few stand for themselves, without blocks."""
    if (fewest := min(len(first), len(second))) < _FEWEST_VALUES:
        return None
    return _of_blocks(
        first, second, [min(k, fewest) for k in _BLOCKS] if fewest >= _FEWEST_STEPS else [fewest]
    )


def of_pairs(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The same of values at the same steps: what both have in common drops out."""
    apart = [other - one for one, other in zip(first, second, strict=True)]
    if (found := of_values([0.0] * len(first), apart)) is None:
        return None
    before = fmean(first)
    return found._replace(before=before, after=before + found.after)


def of_runs(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The same of whole runs, one number each: what differs from run to run counts as well."""
    freedom = len(first) + len(second) - 2
    if not first or not second or freedom < _FEWEST_RUNS - 2:
        return None
    means = [fmean(first), fmean(second)]
    # One variance for both (Student): so one side may be a single run.
    square = sum(_squares(run, mean) for run, mean in zip((first, second), means, strict=True))
    one, other = (
        _Centre(mean, square / freedom / len(run), freedom)
        for run, mean in zip((first, second), means, strict=True)
    )
    return _worst([(one, other)], 0, freedom)


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean of all but the outermost tenth on either side."""
    cut = int(_TRIMMED * len(values))
    return fmean(sorted(values)[cut : len(values) - cut])


def without_pauses(values: Sequence[float]) -> list[int]:
    """The positions of all values but a few that are far above the others."""
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    limit = middle + _FAR * max(1.4826 * spread, 0.01 * abs(middle))
    kept = [at for at, value in enumerate(values) if value <= limit]
    return kept if len(values) - len(kept) <= _MOST_PAUSES * len(values) else [*range(len(values))]


def split(values: Sequence[float], blocks: int) -> list[Sequence[float]]:
    """So many parts of almost the same length."""
    edges = [at * len(values) // blocks for at in range(blocks + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def _of_blocks(
    first: Sequence[float],
    second: Sequence[float],
    counts: Sequence[int],
    of_runs: float | None = None,
) -> Difference:
    """By so many blocks, one count after the other."""
    centres = [
        [_centre([fmean(each) for each in split(run, count)], of_runs) for run in (first, second)]
        for count in counts
    ]
    longest = max(len(first), len(second)) // counts[-1]
    return _worst([(one, other) for one, other in centres], longest)


def _worst(
    centres: Sequence[tuple[_Centre, _Centre]], longest: int, pooled: float | None = None
) -> Difference:
    """The largest p of these tests; the means are those of the first one.

    *pooled*: the degrees of freedom where both sides have one variance.
    """
    before, after = centres[0][0].mean, centres[0][1].mean
    apart, p, reach = after - before, 0.0, 0.0
    for one, other in centres:
        variance = one.variance + other.variance
        error = math.sqrt(variance)
        if not error:
            p = max(p, 1.0 if other.mean == one.mean else 0.0)
            continue
        if not math.isfinite(error):
            p, reach = 1.0, math.inf  # beyond what a number holds
            continue
        # Welch: each side has its own variance. In shares of both, as a square may be too large.
        shares = sum((each.variance / variance) ** 2 / each.freedom for each in (one, other))
        freedom = pooled or 1 / shares
        p = max(p, two_sided(abs(other.mean - one.mean) / error, freedom))
        reach = max(reach, quantile(_CONFIDENCE, freedom) * error)
    return Difference(before, after, apart - reach, apart + reach, p, longest)


def _centre(means: Sequence[float], of_runs: float | None) -> _Centre:
    """The trimmed mean of block means, its variance, and its degrees of freedom (Yuen).

    *of_runs*: the variance between runs, as a multiple of that between blocks; None if unknown.
    """
    blocks = len(means)
    # Of a few blocks it cannot be told: these are long enough to need no correction.
    correlation = _correlation(means) if blocks >= _BLOCKS[0] else 0.0
    means = sorted(means)
    cut = int(_TRIMMED * blocks)
    kept = means[cut : blocks - cut]
    # Winsorized: what is cut counts as the outermost that stays.
    outer = [kept[0]] * cut + kept + [kept[-1]] * cut
    square = _squares(outer, fmean(outer))
    # Blocks that still depend on each other say less than as many that do not.
    inflation = (1 + correlation) / (1 - correlation)
    if of_runs is None:
        # Where the pace wanders over the whole run, another run would begin elsewhere.
        of_runs = 1.0 if correlation > _WANDERS else 0.0
    variance = inflation * square / (len(kept) * (len(kept) - 1)) + of_runs * square / (blocks - 1)
    return _Centre(fmean(kept), variance, len(kept) - 1)


def _squares(values: Sequence[float], middle: float) -> float:
    # A power that is too large for a number is an error, a product is infinite.
    return sum((each - middle) * (each - middle) for each in values)


def _correlation(means: Sequence[float]) -> float:
    """How much a block resembles the one before: 0 to 0.8."""
    middle = fmean(means)
    if not (square := _squares(means, middle)):
        return 0.0
    apart = [each - middle for each in means]
    found = sum(a * b for a, b in pairwise(apart)) / square
    # In a few blocks it is too low by about this much.
    return min(max(found + 1 / len(means), 0.0), 0.8)


def two_sided(t: float, freedom: float) -> float:
    """The probability of a larger |t|, by Student's distribution.

    With t the tangent of an angle, its density is a power of the cosine (Simpson's rule).
    """
    first = math.atan(t / math.sqrt(freedom))
    width = (math.pi / 2 - first) / _PANELS
    angles = (first + at * width for at in range(_PANELS + 1))
    heights = [math.pow(max(math.cos(angle), 0.0), freedom - 1) for angle in angles]
    sums = heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2])
    whole = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return min(2 * sums * width / 3 / (whole * math.sqrt(math.pi)), 1.0)


@lru_cache(maxsize=256)
def quantile(confidence: float, freedom: float) -> float:
    """The |t| that is exceeded with a probability of 1 - *confidence*."""
    low, high = 0.0, 64.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > 1 - confidence else (low, middle)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """Larger p for several tests at once, so that all together err as rarely as one."""
    order = sorted(range(len(ps)), key=lambda at: ps[at])
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(ps[at] * (len(ps) - rank), 1.0))
        adjusted[at] = least
    return adjusted
