"""What all detectors have in common: what they are told of a rank, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.stall.evidence import Evidence, Position
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Step
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict


class RankState(NamedTuple):
    """What is known of a rank, and seldom changes."""

    labels: Labels
    world_size: int = 0
    """How many ranks of its run train together, on all nodes; 0: not known."""
    own_world_size: int | None = None
    """How many ranks it has by its own account. Evaluators and actors report another world."""
    waits_known: bool | None = None
    """Whether its waits for other ranks can be told from work; None: not known yet."""
    own_collectives: tuple[str, ...] = ()
    """The phases in which the user's own code calls collectives: if one rank does, all do."""
    calls_noted: bool = False
    """Whether its calls to process groups are noted in measured steps: see `StepFacts.calls`."""
    device_clock: bool | None = None
    """Whether the clock of the device that works for it is known; None: no device does."""
    under_nccl: bool = False
    began_ns: int = 0
    """When the process began, on the clock of its steps."""
    clock_shift_ns: int = 0
    """From the clock of its steps to the one that all processes of its host share."""

    @property
    def is_beside(self) -> bool:
        """Whether it is beside those that train together.

        No rank waits for it. So it is not compared, and it neither stalls the run nor keeps it
        going.
        """
        return self.own_world_size not in (None, self.world_size)

    @property
    def waits_in(self) -> frozenset[str] | None:
        """The phases of work in which it may wait for others, too; None: that is not known."""
        return frozenset(self.own_collectives) if self.waits_known else None


class NonfiniteValue(NamedTuple):
    """A name whose values were finite once, with the first value that was not."""

    name: str
    split: str
    value: float
    step: int | None
    time_ns: int
    finite_step: int | None = None
    """The step of the last value of this name that was finite, if known."""

    @property
    def order(self) -> tuple[bool, int, bool, int]:
        """Sorts the first one first: by step, or by time where a value has no step.

        Of one step, gradients come last: the ranks have summed them up by then.
        """
        return self.step is None, self.step or 0, "grad" in self.name, self.time_ns

    def may_precede(self, other: NonfiniteValue) -> bool:
        """Whether this rank may have lost the value before the other did."""
        if self.step is None or other.step is None:
            return False
        return self.finite_step is None or self.finite_step < other.step


class Observation(NamedTuple):
    """What is new of a rank. Each detector takes of it what it needs."""

    now_ns: int = 0
    steps: Sequence[Step] = ()
    """Its steps on the clock of its host."""
    facts: Sequence[StepFacts] = ()
    """The same on the clock that its waits are on: its device's where it has one."""
    position: Position | None = None
    evidence: Evidence = Evidence()
    """What it has answered, and what the kernel says of it, where a detector has asked."""
    nonfinite: Sequence[NonfiniteValue] | None = None
    """The values that are not finite now; None: they were not looked at."""
    ended: EndedProcess | None = None
    """How it ended. The same end may come again, when more is known of it."""


class Detector(Protocol):
    """Finds one kind of trouble among the ranks of one run."""

    def feed(self, rank: RankState, seen: Observation) -> None:
        """What is new of a rank."""
        return

    def forget(self, labels: Labels) -> None:
        """The rank is gone, or has other labels now."""
        return

    def leave_out(self, labels: Labels) -> None:
        """The agent of its own node judges the rank, until it is fed again."""
        self.forget(labels)

    def poll(self, now_ns: int) -> list[Change]:
        """What has changed since the last poll."""
        ...

    def present(self) -> list[Verdict]:
        """The open verdicts whose figures move, as they are now."""
        return []
