"""Finds out where in a step ranks wait for one another, from when they put what in line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from otel_ddp.diagnosis.facts import middle

# Of what a rank is late more than usual, others lose all where they wait, and nothing where they
# do not: so many standard deviations from one half are believed.
_CLEARLY = 3.0
# Where nobody is ever late by more or less: a reading that makes ranks so much more alike.
_MORE_ALIKE = 1.3
# What is further out than so many times the usual is taken for no further.
_FAR = 4.0
# Nobody waits for somebody who was there: more than the clock's grain, in more cases than these.
_GRAIN_NS = 50_000
_EXCEPTIONS = 0.02
# What varies by less than this does not vary.
_TICK_NS = 1_000
# Where so little could be waiting it makes no difference which reading is right.
_HARMLESS = 0.01


class Segment(NamedTuple):
    """From one collective of a rank to its next one."""

    rank: int
    place: int
    """Which of its step's collectives it begins with."""
    gap_ns: int
    wait_ns: int
    """How long all others were not yet where it began, if it waited for them."""
    delay_ns: int
    """What the last one had needed to get there."""


class Place(NamedTuple):
    """One place in a step: what lies between two of its collectives, in all steps of all ranks."""

    ops: tuple[str, str]
    segments: Sequence[Segment]


def who_waits(places: Sequence[Place]) -> tuple[list[bool], str]:
    """Of each place whether ranks wait there for all others; or an operation that is unclear."""
    found = [_waits(segments) for _, segments in places]
    # What is unclear of one place is as in those that are like it, or clear of all together: of
    # those between the same operations, and else of all.
    by_ops: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (ops, _) in enumerate(places):
        by_ops[ops].append(place)
    for like in (*by_ops.values(), range(len(places))):
        clear = {found[place] for place in like} - {None}
        unclear = [place for place in like if found[place] is None]
        if not unclear:
            continue
        if len(clear) == 1:
            (waits,) = clear
        else:
            waits = _waits([each for place in unclear for each in places[place].segments])
        for place in unclear:
            found[place] = waits
    unclear = [place for place, waits in enumerate(found) if waits is None]
    gaps_ns = sum(each.gap_ns for _, segments in places for each in segments)
    most_ns = sum(each.wait_ns for place in unclear for each in places[place].segments)
    if most_ns > _HARMLESS * gaps_ns:
        return [], places[unclear[0]].ops[0].rpartition(":")[2]
    return [bool(waits) for waits in found], ""


def _waits(segments: Sequence[Segment]) -> bool | None:
    """Whether ranks wait here; None: that is unclear."""
    refuted = sum(each.wait_ns > each.gap_ns + _GRAIN_NS for each in segments)
    if refuted > _EXCEPTIONS * len(segments):
        return False
    lose = _lose([each for each in segments if each.wait_ns > 0])
    return _are_level(segments) if lose is None else lose


def _lose(segments: Sequence[Segment]) -> bool | None:
    """Whether these ranks lose what the latest one had needed more than usual; None: unclear.

    By that alone, as a rank that is early is often a fast one: what it waits more, it then needs
    less, and the two together say nothing.
    """
    gaps = _unusual([(each.rank, each.place, each.gap_ns) for each in segments])
    waits = _unusual([(each.rank, each.place, each.wait_ns) for each in segments])
    delays = _unusual([(each.rank, each.place, each.delay_ns) for each in segments])
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
    """Values, less what is usual for their rank and place."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place, value in found:
        groups[rank, place].append(value)
    usual = {key: middle(values) for key, values in groups.items()}
    values = [value - usual[rank, place] for rank, place, value in found]
    far = _FAR * middle([abs(each) for each in values]) if values else 0.0
    return [max(-far, min(each, far)) for each in values]


def _are_level(segments: Sequence[Segment]) -> bool | None:
    """Whether all ranks need the same in each place, but for such waits; None: unclear."""
    by_place: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in segments:
        by_place[each.place].append((each.gap_ns, max(each.gap_ns - each.wait_ns, 0)))
    columns = [zip(*each, strict=True) for each in by_place.values()]
    with_waits, without = (sum(map(_spread, each)) for each in zip(*columns, strict=True))
    return True if with_waits > _MORE_ALIKE * without else None


def _spread(values: Sequence[float]) -> float:
    center = middle(values)
    return sum(abs(each - center) for each in values)
