"""Medians, and how far each rank is above the median of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def median(values: Sequence[float]) -> float:
    """The median; the statistics module's is ten times slower."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def spread(values: Sequence[float]) -> float:
    """The median distance from the median."""
    middle = median(values)
    return median([abs(each - middle) for each in values])


def lower_median(values: Sequence[float]) -> float:
    """The median; of an even number of values the lower one of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def without(values: Sequence[float], i: int) -> list[float]:
    """All values but number *i*."""
    return [*values[:i], *values[i + 1 :]]


def excesses(values: Sequence[float]) -> list[float]:
    """For each value: by how much it exceeds the median of the others.

    This runs for every step, so one sort serves all values.
    """
    ordered = sorted(values)
    half = len(values) // 2
    if len(values) % 2 == 0:
        low, high = ordered[half - 1], ordered[half]
        return [each - low if each > low else each - high for each in values]
    low, center, high = ordered[half - 1 : half + 2]
    without_low, without_high = (center + high) / 2, (low + center) / 2
    without_center = (low + high) / 2
    return [
        each - (without_high if each > center else without_low if each < center else without_center)
        for each in values
    ]


def excesses_within(values: Sequence[float], kinds: Collection[Sequence[int]]) -> list[float]:
    """The same within each kind; 0 for the only value of a kind. *kinds*: the places of each."""
    if len(kinds) == 1:
        return excesses(values)
    found = [0.0] * len(values)
    for places in kinds:
        if len(places) > 1:
            above = excesses([values[at] for at in places])
            for at, each in zip(places, above, strict=True):
                found[at] = each
    return found
