"""The last steps that all ranks of a run have made, as columns: all that is compared looks here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from math import log2
from operator import sub
from typing import Any, NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.straggler import limits

_MOST_STEPS = limits.LENGTHS[-1]
_Column = Sequence[int]
"""A value of each rank, in their order."""


class Compared(NamedTuple):
    """One step of all ranks."""

    number: int
    steps: int
    """How many steps it stands for: itself, and those before it that were not measured."""
    step_ns: float
    """How long each of these took."""
    first_ended_ns: int
    last_ended_ns: int
    took_ns: int
    """By the first rank."""
    works_ns: _Column
    """The own time of each rank, without the phases that are not compared."""
    waits_ns: _Column
    amounts: _Column
    """Tokens, or samples."""
    phases_ns: Sequence[_Column]
    """One for each of WORK_PHASES, and so are the next two."""
    paced_ns: Sequence[_Column] | None
    host_ns: Sequence[_Column] | None
    behind_ns: Sequence[int | None]

    @classmethod
    def of(
        cls, number: int, columns: Any, left_out: Sequence[int], steps: int, step_ns: float
    ) -> Compared:
        """*columns*: of all ranks. *left_out*: phases that are not compared."""
        return cls(
            number=number,
            steps=steps,
            step_ns=step_ns,
            first_ended_ns=min(columns.ended_ns),
            last_ended_ns=max(columns.ended_ns),
            took_ns=columns.took_ns[0],
            works_ns=_packed(works_ns(columns, left_out)),
            waits_ns=_packed(columns.wait_ns),
            amounts=_packed(columns.work),
            phases_ns=_by_phase(columns.phases_ns),
            paced_ns=_by_phase(columns.paced_ns),
            host_ns=_by_phase(columns.host_ns),
            behind_ns=_packed(columns.behind_ns),
        )


def _packed(column: Sequence[Any]) -> Sequence[Any]:
    """In a tenth of the memory, where there are very many ranks; a fifth from 4 s on."""
    for size in "Iq" if len(column) >= limits.MANY_RANKS else "":
        # It may not be known of all of them, or be beyond 64 bits.
        with suppress(TypeError, OverflowError):
            return array(size, column)
    return column


def _by_phase(ranks: Sequence[Any]) -> Any:
    """None where the clock of a device is not known on all ranks."""
    return None if None in ranks else [_packed(each) for each in zip(*ranks, strict=True)]


class Window:
    """As many of these steps as the rule looks back on."""

    def __init__(self, left_out: Sequence[int] = (), stages: Sequence[int] = ()) -> None:
        """*left_out*: indices into WORK_PHASES, of the phases that are not compared.

        *stages*: of each rank, its stage of a pipeline.
        """
        self.left_out, self.stages = left_out, stages
        self.may_hide = False
        """Some of the waits may have been hidden by work, and be none."""
        self._steps: list[Compared] = []

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: Compared) -> None:
        """One more."""
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]

    def last(self, length: int) -> list[Compared]:
        """The last ones, oldest first."""
        return self._steps[max(len(self._steps) - length, 0) :]

    def steps_ns(self, length: int) -> list[float]:
        """How long the last ones took."""
        return [each.step_ns for each in self.last(length)]

    def step_s(self, length: int) -> float:
        """The median of that, in seconds."""
        return median(self.steps_ns(length)) / 1e9

    def stand_for(self, length: int) -> int:
        """How many steps the last ones stand for."""
        return sum([each.steps for each in self.last(length)])

    def one_of(self, length: int) -> int:
        """Of how many steps one is measured: a power of two."""
        return 1 << round(log2(self.stand_for(length) / length))

    @property
    def apart(self) -> float:
        """How far apart the last steps lie."""
        return self.stand_for(limits.SOON_FEWEST) / min(len(self), limits.SOON_FEWEST)


def works_ns(columns: Any, left_out: Sequence[int]) -> list[int]:
    """What each rank worked in a step, without the phases that are not compared."""
    found = list(map(sub, columns.took_ns, columns.wait_ns))
    for at in left_out:
        found = list(map(sub, found, [each[at] for each in columns.phases_ns]))
    return found
