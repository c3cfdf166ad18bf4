"""The interface of detectors: the state and observations of a rank go in, verdicts come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.stall.evidence import Evidence, Position
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Step
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict


class RankState(NamedTuple):
    """The properties of a rank that seldom change."""

    labels: Labels
    world_size: int = 0
    """How many ranks of the run train together, on all nodes; 0 if unknown."""
    own_world_size: int | None = None
    """The world size that the rank reports; for evaluators and actors not equal to `world_size`."""
    waits_known: bool | None = None
    """Whether waits for other ranks are measured separately from work; None if not yet known."""
    own_collectives: tuple[str, ...] = ()
    """The phases in which the user's code calls collectives; the same on all ranks."""
    calls_noted: bool = False
    device_clock: bool | None = None
    """Whether events on the device time the rank's steps; None if the rank uses no device."""
    under_nccl: bool = False
    began_ns: int = 0
    clock_shift_ns: int = 0
    """The node's monotonic clock minus the clock of the times in the rank's steps."""

    @property
    def is_beside(self) -> bool:
        """Whether the rank is outside the world of the ranks that train together.

        No rank waits for such a rank, so it is not compared, and hang detection ignores it.
        """
        return self.own_world_size not in (None, self.world_size)

    @property
    def waits_in(self) -> frozenset[str] | None:
        """The phases of work that may include waits for other ranks; None if unknown."""
        return frozenset(self.own_collectives) if self.waits_known else None


class NonfiniteValue(NamedTuple):
    """The first NaN or infinite value under a logged name; all its values before were finite."""

    name: str
    split: str
    value: float
    step: int | None
    time_ns: int
    finite_step: int | None = None

    @property
    def order(self) -> tuple[bool, int, bool, int]:
        """Sort key: by step, or by time if a value has no step.

        Within a step, gradients come last: they are reduced over all ranks, so another rank may
        have made them NaN.
        """
        return self.step is None, self.step or 0, "grad" in self.name, self.time_ns

    def may_precede(self, other: NonfiniteValue) -> bool:
        """Whether this value may have become non-finite before the other one did; False if
        unknown."""
        if self.step is None or other.step is None:
            return False
        return self.finite_step is None or self.finite_step < other.step


class Observation(NamedTuple):
    """New data of a rank. Each detector uses some of the fields."""

    now_ns: int = 0
    steps: Sequence[Step] = ()
    """New steps on the host's clock."""
    facts: Sequence[StepFacts] = ()
    """New steps on the device's clock if there is one, else on the host's."""
    position: Position | None = None
    evidence: Evidence = Evidence()
    """What the process and the kernel answered when a detector asked about the rank."""
    nonfinite: Sequence[NonfiniteValue] | None = None
    """The logged values that are NaN or infinite now; None if this was not checked."""
    ended: EndedProcess | None = None
    """How the process ended; fed again when kernel or launcher report more about the end."""


class Detector(Protocol):
    """Finds one kind of trouble among the ranks of one run."""

    def feed(self, rank: RankState, seen: Observation) -> None:
        """Take in new data of a rank."""
        return

    def forget(self, labels: Labels) -> None:
        """Drop a rank that is gone or has other labels now."""
        return

    def leave_out(self, labels: Labels) -> None:
        """Ignore this rank until `feed` gets it again: until then its own node's agent judges
        it."""
        self.forget(labels)

    def poll(self, now_ns: int) -> list[Change]:
        """The changes since the last poll."""
        ...

    def present(self) -> list[Verdict]:
        """The open verdicts with their current figures."""
        return []
