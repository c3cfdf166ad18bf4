"""Tests whether chance explains the difference of the means of two runs.

The samples are means of blocks of steps, since neighbouring steps are correlated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

# Each run is divided into this many blocks. It is a small number, so that the blocks are long and
# their means hardly correlated.
_BLOCKS = 12
# Winsorize this many of the lowest and of the highest blocks, because the first steps of a run are
# slow, and a run may become slow later.
_OUTLIERS = 2
_FEWEST_STEPS = 40
# A run logs fewer values than it makes steps, so fewer are enough for a test.
_FEWEST_VALUES = 5
# On a shared machine, runs of the same code differed by 4 % to 6 %, the blocks within a run by 3 %.
# So the variance between runs is this many times the variance between blocks.
_RUNS_VARY = 3.0
# The same factor for logged values. It is small, since they hardly depend on the machine, but not
# 0: a value that drifts during a run, such as a loss, also differs between runs of the same code.
_VALUES_VARY = 0.1
# A step is a pause if it takes this many standard deviations longer than the median step.
_FAR = 10.0
# Pauses are excluded. If they are a larger share of the steps than this, they are part of the
# training, and none is excluded.
_MOST_PAUSES = 0.03


def of_steps(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The p value for the step times of two runs; None if there are too few steps.

    Runs of the same code differ too, since the speed of the machine varies. Two runs are too few to
    measure this variance, so it is taken to be `_RUNS_VARY` times the variance within the runs.
    """
    if min(len(first), len(second)) < _FEWEST_STEPS:
        return None
    means = _means(first, _BLOCKS), _means(second, _BLOCKS)
    return _of_means(*means, _RUNS_VARY, _OUTLIERS)


def of_values(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The p value for one logged value of two runs; None if a run logged it too rarely.

    If a run has fewer values than blocks, each value is a block.
    """
    fewest = min(len(first), len(second))
    if fewest < _FEWEST_VALUES:
        return None
    blocks = min(_BLOCKS, fewest)
    return _of_means(_means(first, blocks), _means(second, blocks), _VALUES_VARY)


def of_pairs(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The p value of a paired test, for logged values at the same steps of two runs."""
    apart = [other - one for one, other in zip(first, second, strict=True)]
    return of_values([0.0] * len(first), apart)


def without_pauses(values: Sequence[float]) -> list[int]:
    """The indices of the values that are no pauses; all indices if pauses are frequent."""
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    limit = middle + _FAR * max(1.4826 * spread, 0.01 * abs(middle))
    kept = [at for at, value in enumerate(values) if value <= limit]
    return kept if len(values) - len(kept) <= _MOST_PAUSES * len(values) else [*range(len(values))]


def _means(values: Sequence[float], blocks: int) -> list[float]:
    """Divide the values into *blocks* blocks of almost equal length; returns the mean of each."""
    edges = [at * len(values) // blocks for at in range(blocks + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]


def _of_means(
    first: Sequence[float], second: Sequence[float], runs_vary: float, outliers: int = 0
) -> float:
    """Student's t test with a pooled variance.

    *runs_vary*: the variance between runs, as a multiple of the variance between these means.
    *outliers*: how many samples at each end to trim for the mean, and to winsorize for the variance
    (Yuen).
    """
    sides = [sorted(first), sorted(second)]
    inner = [side[outliers : len(side) - outliers] for side in sides]
    freedom = len(inner[0]) + len(inner[1]) - 2
    apart = abs(fmean(inner[0]) - fmean(inner[1]))
    squares = sum(_squares([*kept[:1] * outliers, *kept, *kept[-1:] * outliers]) for kept in inner)
    variance = squares / freedom
    error = math.sqrt(variance * (1 / len(inner[0]) + 1 / len(inner[1]) + 2 * runs_vary))
    if not math.isfinite(error):
        return 1.0  # overflow
    if not error:
        return 0.0 if apart else 1.0
    return two_sided(apart / error, freedom)


def _squares(means: Sequence[float]) -> float:
    middle = fmean(means)
    # For large numbers `**` raises OverflowError, while a product becomes infinite.
    return sum((each - middle) * (each - middle) for each in means)


def two_sided(t: float, freedom: float) -> float:
    """The two-sided p value of Student's t distribution, by Wallace's normal approximation.

    With 8 or more degrees of freedom, a result of 0.01 is at most 1 % too high. The relative error
    of smaller results is larger.
    """
    nearer = (8 * freedom + 1) / (8 * freedom + 3)
    return math.erfc(nearer * math.sqrt(freedom * math.log1p(t * t / freedom) / 2))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction of p values for multiple tests."""
    order = sorted(range(len(ps)), key=lambda at: ps[at])
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(ps[at] * (len(ps) - rank), 1.0))
        adjusted[at] = least
    return adjusted
