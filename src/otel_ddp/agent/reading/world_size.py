"""How many ranks of a run train together, by what its processes say of their world size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class World(NamedTuple):
    """What a process says of how many ranks train with it."""

    size: int
    trains: bool
    """It has made a step, or a launcher has started it again: not so most evaluators and actors."""


def training_world(living: Iterable[World], last: World) -> int:
    """How many ranks of a run train together, by its living processes, and as it was *last*.

    What is left, or comes, after the training has ended does not become the training: it has to
    train, or to be several where no process was ever heard to train.
    """
    living = list(living)
    if trains := [each.size for each in living if each.trains]:
        return max(trains)
    largest = max((each.size for each in living), default=0)
    if not last.size or (largest > 1 and not last.trains):
        return largest
    return last.size
