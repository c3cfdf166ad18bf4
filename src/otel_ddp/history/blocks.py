"""Tests whether chance explains the difference of two means, for comparisons of runs.

Samples are means of blocks of steps, since neighbouring steps depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

# A block must be longer than steps depend on each other.
_BLOCKS = 12
# Of these so many of the lowest and of the highest count as their neighbours do: a run may be late
# from some step on, and its first steps are slow.
_OUTLIERS = 2
_FEWEST_STEPS = 40
# Logged values are few, and further from each other.
_FEWEST_VALUES = 5
# Runs of the same code, on a machine that others share, differed by 4 % to 6 % from each other, and
# their blocks by 3 %. So the variance between runs is that between blocks, times this.
_RUNS_VARY = 3.0
# A value that wanders over a run would begin elsewhere in another one.
_VALUES_VARY = 0.1
# A step this far from the median, in units of the usual distance, is a pause and no step...
_FAR = 10.0
# ... unless they are many: then they belong to the training.
_MOST_PAUSES = 0.03
# Of an integral: p is then right to a thousandth of itself.
_PANELS = 200


def of_steps(first: Sequence[float], second: Sequence[float]) -> float | None:
    """How probable a difference as that of two runs' steps is by chance; None: there are too few.

    A machine has another pace in each run, and that counts as chance too. By how much its pace may
    differ is told by how it changes within these.
    """
    if min(len(first), len(second)) < _FEWEST_STEPS:
        return None
    means = _means(first, _BLOCKS), _means(second, _BLOCKS)
    return _of_means(*means, _RUNS_VARY, _OUTLIERS)


def of_values(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The same of logged values; a few stand for themselves, without blocks."""
    fewest = min(len(first), len(second))
    if fewest < _FEWEST_VALUES:
        return None
    blocks = min(_BLOCKS, fewest)
    return _of_means(_means(first, blocks), _means(second, blocks), _VALUES_VARY)


def of_pairs(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The same of values at the same steps: what both have in common drops out."""
    apart = [other - one for one, other in zip(first, second, strict=True)]
    return of_values([0.0] * len(first), apart)


def without_pauses(values: Sequence[float]) -> list[int]:
    """The positions of all values but a few that are far above the others."""
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    limit = middle + _FAR * max(1.4826 * spread, 0.01 * abs(middle))
    kept = [at for at, value in enumerate(values) if value <= limit]
    return kept if len(values) - len(kept) <= _MOST_PAUSES * len(values) else [*range(len(values))]


def _means(values: Sequence[float], blocks: int) -> list[float]:
    """Of so many parts of almost the same length."""
    edges = [at * len(values) // blocks for at in range(blocks + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]


def _of_means(
    first: Sequence[float], second: Sequence[float], runs_vary: float, outliers: int = 0
) -> float:
    """By Student's t test, with one variance for both sides.

    *runs_vary*: the variance between runs, as a multiple of that between these means. *outliers*:
    so many at each end are left out of their mean, and are as far from it as the next one (Yuen).
    """
    sides = [sorted(first), sorted(second)]
    inner = [side[outliers : len(side) - outliers] for side in sides]
    freedom = len(inner[0]) + len(inner[1]) - 2
    apart = abs(fmean(inner[0]) - fmean(inner[1]))
    squares = sum(_squares([*kept[:1] * outliers, *kept, *kept[-1:] * outliers]) for kept in inner)
    variance = squares / freedom
    error = math.sqrt(variance * (1 / len(inner[0]) + 1 / len(inner[1]) + 2 * runs_vary))
    if not math.isfinite(error):
        return 1.0  # beyond what a number holds
    if not error:
        return 0.0 if apart else 1.0
    return two_sided(apart / error, freedom)


def _squares(means: Sequence[float]) -> float:
    middle = fmean(means)
    # A power that is too large for a number is an error, a product is infinite.
    return sum((each - middle) * (each - middle) for each in means)


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


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction of p for several tests: all together err as rarely as one."""
    order = sorted(range(len(ps)), key=lambda at: ps[at])
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(ps[at] * (len(ps) - rank), 1.0))
        adjusted[at] = least
    return adjusted
