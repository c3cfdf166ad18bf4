"""What the judge is given of one process, wherever its records come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Memory, NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import Evidence, Position, Question
from otel_ddp.diagnosis.step_facts import DeviceStep, TimedStep
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal.process_state import ProcessState


class Source(Protocol):
    """One process, for as long as it has the same labels.

    A journal of this node is one kind, what the agent of another node reports is the other.
    """

    has_news: bool
    """Whether anything of it may be new since the last poll."""
    is_left_out: bool
    """Whether it is of a node that is not heard, while the others go on: not compared here."""
    labels: Labels

    @property
    def began_ns(self) -> int:
        """When the process began: of two with the same labels, the newer one counts."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this node. Those of others are fed where they have news."""
        ...

    @property
    def is_at_work(self) -> bool:
        """Whether it has not ended."""
        ...

    @property
    def trains(self) -> bool:
        """Whether it will train, as far as that is known before its first step."""
        ...

    @property
    def project(self) -> str: ...

    def state(self) -> RankState:
        """What is known of its rank, but for the ranks beside it."""
        ...

    def steps(self) -> tuple[Sequence[TimedStep], Sequence[DeviceStep]]:
        """The steps that are new, on the clock of its host and on that of its device."""
        ...

    def position(self, origin_ns: int) -> Position | None:
        """Where it is in its training; *origin_ns*: when the monotonic clock was 0."""
        ...

    def watch(self) -> None:
        """Note what can only be read while the process lives."""

    def memory(self) -> Memory | None: ...

    def device_memory(self) -> Memory | None: ...

    def nonfinite(self, now_ns: int) -> Sequence[NonfiniteValue]:
        """Its logged values that were finite once, and no longer are. Read at each poll."""
        ...

    def ask(self, question: Question, now_ns: int) -> bool:
        """Ask it a question; whether it can receive one."""
        ...

    def evidence(self, now_ns: int) -> Evidence:
        """What it has answered to `where` and `what`, and what the kernel says of it now."""
        ...

    def arrivals(self, now_ns: int) -> Mapping[str, Any] | None:
        """What it has answered to `when`; None: nothing yet."""
        ...

    def end(self) -> EndedProcess:
        """How it ended, as far as that is known at once."""
        ...

    def cause(self) -> Mapping[str, Any]:
        """What the kernel and its launcher say of its end by now; also later, without records."""
        ...

    def present_ns(self) -> int:
        """When the process was last surely there, even if it has reported its end; 0: not known."""
        ...

    def close(self) -> None:
        """Nothing more is asked of its end."""

    def describe(self) -> ProcessState:
        """What a post-mortem shows of it."""
        ...
