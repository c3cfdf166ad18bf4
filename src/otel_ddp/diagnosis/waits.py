"""Finds out between which collectives of a step ranks wait for each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from otel_ddp.diagnosis.medians import median

# When one rank is later than usual, the others lose all of that where they wait, and nothing where
# they do not. The measured share must be this many standard deviations away from one half.
_CLEARLY = 3.0
# Where no rank varies in its lateness: waits are there if that makes the ranks so much more alike.
_MORE_ALIKE = 1.3
# Values that are further out than so many times the usual are taken as this far.
_FAR = 4.0
# A rank does not wait for one that was there already. So a wait that is longer than the gap speaks
# against waiting, where it exceeds the clock's grain in more than this share of cases.
_GRAIN_NS = 50_000
_EXCEPTIONS = 0.02
# What varies by less than this does not vary.
_TICK_NS = 1_000
# Where so small a share could be waiting, it makes no difference whether it is.
_HARMLESS = 0.01


class Segment(NamedTuple):
    """From one collective of one rank to its next one, in one step."""

    rank: int
    interval: int
    """The index of the collective that it begins with, within its step."""
    gap_ns: int
    wait_ns: int
    """How long it waited for the last rank to arrive, if it did wait."""
    delay_ns: int
    """How long that last rank had needed to get there."""


class Interval(NamedTuple):
    """What lies between two collectives of a step, in all steps of all ranks."""

    ops: tuple[str, str]
    segments: Sequence[Segment]


def find_waits(intervals: Sequence[Interval]) -> tuple[list[bool], str]:
    """For each interval, whether ranks wait in it; or the name of an operation that is unclear."""
    found = [_waits(segments) for _, segments in intervals]
    # An unclear interval is like those between the same operations, else like all others. Where
    # those are unclear too, or disagree, the unclear ones are judged together.
    by_ops: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, (ops, _) in enumerate(intervals):
        by_ops[ops].append(i)
    for alike in (*by_ops.values(), range(len(intervals))):
        clear = {found[i] for i in alike} - {None}
        unclear = [i for i in alike if found[i] is None]
        if not unclear:
            continue
        if len(clear) == 1:
            (waits,) = clear
        else:
            waits = _waits([each for i in unclear for each in intervals[i].segments])
        for i in unclear:
            found[i] = waits
    unclear = [i for i, waits in enumerate(found) if waits is None]
    gaps_ns = sum(each.gap_ns for _, segments in intervals for each in segments)
    most_ns = sum(each.wait_ns for i in unclear for each in intervals[i].segments)
    if most_ns > _HARMLESS * gaps_ns:
        return [], intervals[unclear[0]].ops[0].rpartition(":")[2]
    return [bool(waits) for waits in found], ""


def _waits(segments: Sequence[Segment]) -> bool | None:
    """Whether ranks wait here; None: that is unclear."""
    refuted = sum(each.wait_ns > each.gap_ns + _GRAIN_NS for each in segments)
    if refuted > _EXCEPTIONS * len(segments):
        return False
    lose = _lose([each for each in segments if each.wait_ns > 0])
    return _are_level(segments) if lose is None else lose


def _lose(segments: Sequence[Segment]) -> bool | None:
    """Whether these ranks lose what the latest rank needed more than usual; None: unclear.

    The delay of the latest rank alone decides. The wait says nothing by itself: a rank that
    is early is often a fast one, so what it waits more it needs less afterwards.
    """
    gaps = _unusual([(each.rank, each.interval, each.gap_ns) for each in segments])
    waits = _unusual([(each.rank, each.interval, each.wait_ns) for each in segments])
    delays = _unusual([(each.rank, each.interval, each.delay_ns) for each in segments])
    common = sum(map(mul, waits, delays))
    if common <= len(segments) * _TICK_NS**2:
        return None
    lost = sum(map(mul, gaps, delays)) / common
    left = [
        (gap - lost * wait) * delay for gap, wait, delay in zip(gaps, waits, delays, strict=True)
    ]
    deviation = math.sqrt(sum(map(mul, left, left))) / common
    if abs(lost - 0.5) < _CLEARLY * deviation:
        return None
    return bool(lost > 0.5)


def _unusual(found: Sequence[tuple[int, int, int]]) -> list[float]:
    """Values of (rank, interval, value), less what is usual for this rank and interval."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, interval, value in found:
        groups[rank, interval].append(value)
    usual = {key: median(values) for key, values in groups.items()}
    values = [value - usual[rank, interval] for rank, interval, value in found]
    far = _FAR * median([abs(each) for each in values]) if values else 0.0
    return [max(-far, min(each, far)) for each in values]


def _are_level(segments: Sequence[Segment]) -> bool | None:
    """Whether all ranks need the same once such waits are taken out; None: unclear."""
    by_interval: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in segments:
        by_interval[each.interval].append((each.gap_ns, max(each.gap_ns - each.wait_ns, 0)))
    columns = [zip(*each, strict=True) for each in by_interval.values()]
    with_waits, without = (sum(map(_spread, each)) for each in zip(*columns, strict=True))
    return True if with_waits > _MORE_ALIKE * without else None


def _spread(values: Sequence[float]) -> float:
    center = median(values)
    return sum(abs(each - center) for each in values)
