"""Tests whether two series differ, by blocks: neighbouring steps depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    @property
    def ratio(self) -> float | None:
        """The change as a share of the first; None if that is 0."""
        return (self.after - self.before) / abs(self.before) if self.before else None


class _Centre(NamedTuple):
    mean: float
    variance: float
    freedom: int


def test(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The difference of the steps of two runs; None if there are too few.

    A machine has another pace in each run, and that counts as chance too. By how much its pace may
    differ is told by how it changes within these.
    """
    if min(len(first), len(second)) < _FEWEST_STEPS:
        return None
    return _worst(first, second, _BLOCKS, _RUNS_VARY)


def test_means(first: Sequence[float], second: Sequence[float], of_runs: float) -> Difference:
    """The difference of two series of what stands for a block each.

    *of_runs*: by how much runs differ that are equal, as a standard deviation.
    """
    one, other = (
        found._replace(variance=found.variance + of_runs**2)
        for found in (_centre(first, 0.0), _centre(second, 0.0))
    )
    return _combined([(one, other)], 0)


def test_values(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The same of logged values; a few stand for themselves, without blocks."""
    if (fewest := min(len(first), len(second))) < _FEWEST_VALUES:
        return None
    counts = [min(k, fewest) for k in _BLOCKS] if fewest >= _FEWEST_STEPS else [fewest]
    return _worst(first, second, counts)


def test_pairs(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The same of values at the same steps: what both have in common drops out."""
    found = test_values([0.0] * len(first), [b - a for a, b in zip(first, second, strict=True)])
    if found is None:
        return None
    before = fmean(first)
    return found._replace(before=before, after=before + found.after)


def test_runs(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The same of whole runs, one number each: what differs from run to run counts as well."""
    freedom = len(first) + len(second) - 2
    if not first or not second or freedom < _FEWEST_RUNS - 2:
        return None
    before, after = fmean(first), fmean(second)
    # One variance for both (Student): so one side may be a single run.
    square = _squares(first, before) + _squares(second, after)
    error = math.sqrt(square / freedom * (1 / len(first) + 1 / len(second)))
    apart = after - before
    if error:
        p = two_sided(abs(apart) / error, freedom)
    else:
        p = 0.0 if apart else 1.0
    reach = quantile(_CONFIDENCE, freedom) * error
    return Difference(before, after, apart - reach, apart + reach, p, 0)


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
    count = len(values)
    edges = [at * count // blocks for at in range(blocks + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def _worst(
    first: Sequence[float],
    second: Sequence[float],
    counts: Sequence[int],
    of_runs: float | None = None,
) -> Difference:
    """The largest p of tests with so many blocks; means are those of the shortest blocks."""
    centres = []
    for count in counts:
        one, other = ([fmean(each) for each in split(run, count)] for run in (first, second))
        centres.append((_centre(one, of_runs), _centre(other, of_runs)))
    return _combined(centres, max(len(first), len(second)) // counts[-1])


def _combined(centres: Sequence[tuple[_Centre, _Centre]], longest: int) -> Difference:
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
        freedom = 1 / sum((e.variance / variance) ** 2 / e.freedom for e in (one, other))
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
    centre = fmean(outer)
    square = _squares(outer, centre)
    variance = square / (len(kept) * (len(kept) - 1))
    # Blocks that still depend on each other say less than as many that do not.
    inflation = (1 + correlation) / (1 - correlation)
    variance *= inflation
    if of_runs is None:
        # Where the pace wanders over the whole run, another run would begin elsewhere.
        of_runs = 1.0 if correlation > _WANDERS else 0.0
    variance += of_runs * square / (blocks - 1)
    return _Centre(fmean(kept), variance, len(kept) - 1)


def _squares(values: Sequence[float], middle: float) -> float:
    # A power that is too large for a number is an error, a product is infinite.
    return sum((each - middle) * (each - middle) for each in values)


def _correlation(means: Sequence[float]) -> float:
    """How much a block resembles the one before: 0 to 0.8."""
    count, middle = len(means), fmean(means)
    square = _squares(means, middle)
    if not square:
        return 0.0
    apart = [each - middle for each in means]
    found = sum(a * b for a, b in pairwise(apart)) / square
    # In a few blocks it is too low by about this much.
    return min(max(found + 1 / count, 0.0), 0.8)


def two_sided(t: float, freedom: float) -> float:
    """The probability of a larger |t|, by Student's distribution."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def quantile(confidence: float, freedom: float) -> float:
    """The |t| that is exceeded with a probability of 1 - *confidence*."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        if two_sided(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = (
        math.exp(
            math.lgamma(a + b)
            - math.lgamma(a)
            - math.lgamma(b)
            + a * math.log(x)
            + b * math.log1p(-x)
        )
        / a
    )
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    result = d
    for m in range(1, 300):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            result *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return front * result


def holm(ps: Sequence[float]) -> list[float]:
    """Larger p for several tests at once, so that all together err as rarely as one."""
    order = sorted(range(len(ps)), key=lambda at: ps[at])
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(ps[at] * (len(ps) - rank), 1.0))
        adjusted[at] = least
    return adjusted
