"""Finds out in which phases of a step a program waits in collectives that are not DDP's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from otel_ddp import containment
from otel_ddp.torch.process_group import is_up

# Steps that are looked at: before anybody is judged, then now and then. No multiples of what loops
# are made of: every tenth or hundredth step may have a collective that the others have not.
_LOOKED_AT = (5, 11, 23, 47, 71)
_THEN_EVERY = 101
# Where DDP puts in line what it does by itself.
_OF_DDP = ("backward", "comm_wait")


def turns() -> Iterator[int]:
    """The numbers of those steps."""
    return chain(_LOOKED_AT, count(_THEN_EVERY, _THEN_EVERY))


class OwnCollectives:
    """Each process group counts what was put in line: what it grew by in a phase is of that phase.

    Asked on the training thread, in few steps, without a collective and without torch's recorder.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._seen: Counter[str] = Counter()
        self._here: set[str] = set()
        self._own: set[str] = set()
        self._of_ddp: set[int] = set()
        self._numbers: dict[int, int] = {}

    def begin(self, models: list[nn.Module]) -> None:
        """A step begins that is looked at."""
        ddp = [each for each in models if isinstance(each, DistributedDataParallel)]
        self._of_ddp = {id(getattr(each, "process_group", None)) for each in ddp}
        self._here = set()
        self._numbers = _numbers()

    def passed(self, phase: str) -> None:
        """Until now it was in this phase, since it was last looked at."""
        before, self._numbers = self._numbers, _numbers()
        for group, number in self._numbers.items():
            if number > before.get(group, 0) and not (phase in _OF_DDP and group in self._of_ddp):
                self._here.add(phase)

    def end(self) -> list[str]:
        """The phases of which that is true in most steps that were looked at.

        Once told it holds until it is true of few: whoever is told begins anew with each change.
        """
        self._looks += 1
        self._seen.update(self._here)
        for phase, times in self._seen.items():
            if 2 * times > self._looks:
                self._own.add(phase)
            elif 4 * times < self._looks:
                self._own.discard(phase)
        return sorted(self._own)


def none_yet() -> bool:
    """Whether there are process groups, and none was asked for a collective so far."""
    numbers = _numbers()
    return bool(numbers) and not any(numbers.values())


def _numbers() -> dict[int, int]:
    if not is_up():
        return {}
    c10d = getattr(sys.modules["torch.distributed"], "distributed_c10d", None)
    world = getattr(c10d, "_world", None)
    found: dict[int, int] = {}
    for group in list(getattr(world, "pg_names", ())):
        # Private; and a group that this process is not in has none.
        ask: Any = getattr(group, "_get_sequence_number_for_group", None)
        number = None if ask is None else containment.attempt(ask, None)
        if number is not None:
            found[id(group)] = int(number)
    return found
