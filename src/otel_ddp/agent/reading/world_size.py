"""How many ranks of a run train together, by the world sizes of its processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class World(NamedTuple):
    """The world size of a process, and whether that process trains."""

    size: int
    trains: bool
    """It has made a step, or a launcher has restarted it; most evaluators and actors have not."""


def training_world(living: Iterable[World], last: World) -> int:
    """How many ranks of a run train together. *last*: the result of the last call.

    A process that remains or starts after the training has ended does not become the training.
    For that it must train; or there must be several of them, if no process ever trained.
    """
    living = list(living)
    if trains := [each.size for each in living if each.trains]:
        return max(trains)
    largest = max((each.size for each in living), default=0)
    if not last.size or (largest > 1 and not last.trains):
        return largest
    return last.size
