"""Finds the phases of a step in which a program waits in collectives that are not DDP's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from otel_ddp.torch.collectives import started, world

# The steps in which collectives are counted: before any rank is judged, then now and then. No round
# numbers: every tenth or hundredth step may have a collective that the others do not have.
_COUNTED = (5, 11, 23, 47, 71)
_THEN_EVERY = 101
# The phases in which DDP starts its own collectives.
_OF_DDP = ("backward", "comm_wait")


def counted_steps() -> Iterator[int]:
    """The numbers of those steps."""
    return itertools.chain(_COUNTED, itertools.count(_THEN_EVERY, _THEN_EVERY))


class OwnCollectives:
    """Compares, at each change of phase, how many collectives each process group has counted.

    On the training thread, in few steps, without a collective and without torch's recorder.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._steps_with: Counter[str] = Counter()
        self._phases: set[str] = set()
        self._own: set[str] = set()
        self._of_ddp: set[int] = set()
        self._counts: dict[int, int] = {}

    def begin(self, models: list[nn.Module]) -> None:
        """A step begins in which collectives are counted."""
        ddp = [each for each in models if isinstance(each, DistributedDataParallel)]
        self._of_ddp = {id(getattr(each, "process_group", None)) for each in ddp}
        self._phases = set()
        self._counts = _counts()

    def phase_ended(self, phase: str) -> None:
        """The time since the last call was spent in this phase."""
        before, self._counts = self._counts, _counts()
        for group, count in self._counts.items():
            if count > before.get(group, 0) and not (phase in _OF_DDP and group in self._of_ddp):
                self._phases.add(phase)

    def end(self) -> list[str]:
        """The phases that had such collectives in most of the counted steps.

        A phase stays in the answer until few steps had any: each change makes the agent begin anew.
        """
        self._steps += 1
        self._steps_with.update(self._phases)
        for phase, times in self._steps_with.items():
            if 2 * times > self._steps:
                self._own.add(phase)
            elif 4 * times < self._steps:
                self._own.discard(phase)
        return sorted(self._own)


def none_so_far() -> bool:
    """Whether there are process groups, and none has done a collective so far."""
    numbers = _counts()
    return bool(numbers) and not any(numbers.values())


def _counts() -> dict[int, int]:
    """By a group's id, how many collectives it was given so far."""
    counts = {id(group): started(group) for group in list(getattr(world(), "pg_names", ()))}
    return {group: int(count) for group, count in counts.items() if count is not None}
