"""One step of one rank, with all that its journal tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from otel_ddp.vocabulary.words import PHASE_CODE, UNMEASURED


class Call(NamedTuple):
    """What is alike in each step of a call to a process group."""

    group: str
    """The same on all members of the group, and on no other ranks."""
    dimension: str
    """Of the device mesh; empty for a group of no mesh."""
    op: str
    """`allreduce`, `allgather`, `send`, `recv`, ..."""
    peer: int
    """The global rank of the other end of a send or receive; else -1."""
    phase: str
    """In which it was made."""


class Calls(NamedTuple):
    """The calls to process groups of one measured step, in their order."""

    each: tuple[Call, ...]
    """One object for all steps that make the same calls."""
    at_ns: Sequence[int]
    """When this rank has arrived at each of them, on the clock of `Step.ended_ns`."""
    idle: bytes
    """Behind each of them, up to the next one or the end of the step: the share of the time in
    which the thread that trains did not run, in 256ths, rounded down."""


class Part(NamedTuple):
    """A stretch of one phase. The code is the journal's: it also says what the phase waits for."""

    code: int
    began_ns: int
    ended_ns: int

    @property
    def phase(self) -> int:
        """The phase, without what it waits for."""
        return self.code & PHASE_CODE


class Parts(NamedTuple):
    """The parts of a step. They are made on demand, as most callers need only their sums."""

    began_ns: int
    codes: bytes
    spans_ns: Sequence[int]

    def each(self) -> Iterator[Part]:
        """From the first to the last."""
        edges = pairwise(accumulate(self.spans_ns, initial=self.began_ns))
        return (Part(code, *edge) for code, edge in zip(self.codes, edges, strict=True))


class Step(NamedTuple):
    """One step: from the end of the step before it to its own end. Times are since 1970."""

    number: int | None
    """Counted alike on all ranks; None if the process did not record it."""
    began_ns: int
    ended_ns: int
    parts: Parts
    """Without gaps from the beginning; up to the end, unless there is a rest."""
    rest: tuple[tuple[int, int], ...]
    """For a step of very many parts: each code, and its nanoseconds after the last part."""
    gc_s: float
    skipped: bool
    retries: int
    work: int = 0
    """Tokens; or samples if it has no tokens; 0 if neither is known."""
    logged: int | None = None
    """The number under which the user logs it, if one was logged or it differs."""
    paced: tuple[int, ...] = ()
    """On the device's clock, for some phases: the phase, and for how long the device kept up with
    the host, in one number as in the journal."""
    lag_ns: int | None = None
    """On the device's clock: how long after the host it reached the end, at least."""
    profiled: bool = False
    """Torch's profiler was on, as a person had asked."""
    calls: Calls | None = None
    """The calls to process groups; None where they are not noted."""

    @property
    def took_ns(self) -> int:
        """The duration: that of its parts and its rest together."""
        return self.ended_ns - self.began_ns

    @property
    def measured(self) -> bool:
        """Whether its phases were measured."""
        if self.rest and any(code == UNMEASURED for code, _ in self.rest):
            return False
        return UNMEASURED not in self.parts.codes

    def spans(self) -> tuple[tuple[int, int], ...]:
        """The code and the nanoseconds of each part, then of each rest."""
        return (*zip(self.parts.codes, self.parts.spans_ns, strict=True), *self.rest)

    def seconds(self, phase: int) -> float:
        """The time in a phase, whatever that waited for."""
        return sum(each_ns for code, each_ns in self.spans() if code & PHASE_CODE == phase) / 1e9

    def phases(self) -> set[int]:
        """The phases of this step."""
        codes = (*self.parts.codes, *[code for code, _ in self.rest])
        return {code & PHASE_CODE for code in codes}
