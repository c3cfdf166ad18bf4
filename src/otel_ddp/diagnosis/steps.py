"""One step of one rank, as read from its journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from otel_ddp.vocabulary.words import PHASE_CODE, UNMEASURED

# By prefix of torch's names of operations: the name that users know. The first match counts, so
# "reduce_scatter" stands before "reduce", its prefix.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    **{word: word for word in ("reduce_scatter", "reduce", "broadcast", "gather", "scatter")},
    **{word: word for word in ("send", "recv", "barrier")},
}


Collective = tuple[str, str]
"""The label of a process group (`Call.label`), and the name of an operation on it."""


class Call(NamedTuple):
    """A call to a process group, without its time, which differs in each step."""

    group: str
    """An id of the process group, known to its members only."""
    dimension: str
    """The dimension of the device mesh; empty without a mesh."""
    op: str
    """`allreduce`, `allgather`, `send`, `recv`, ..."""
    peer: int
    """The global rank of the other end of a send or receive; else -1."""
    phase: str
    label: str = "other"
    """The dimension; without a mesh: `world`, the group's description, or `other`."""

    @property
    def kind(self) -> Collective:
        """The label and the operation. Few distinct pairs occur, so metrics may use them."""
        found = (word for start, word in _OPERATIONS.items() if self.op.startswith(start))
        return self.label, next(found, "other")


class Calls(NamedTuple):
    """The calls to process groups in one measured step."""

    each: tuple[Call, ...]
    """The calls in order; steps with the same calls share one object."""
    at_ns: Sequence[int]
    """When the rank arrived at each call, on the clock of `Step.ended_ns`."""
    idle: bytes
    """For each call: the share of the time until the next call (or the end of the step) in which
    the training thread did not run, in 256ths, rounded down."""


class Part(NamedTuple):
    """A stretch of a step in which the phase does not change."""

    code: int
    """The code in the journal: the phase in the bits of PHASE_CODE, its details in the others."""
    began_ns: int
    ended_ns: int

    @property
    def phase(self) -> int:
        return self.code & PHASE_CODE


class Parts(NamedTuple):
    """The parts of a step, as one column of codes and one of durations."""

    began_ns: int
    codes: bytes
    spans_ns: Sequence[int]

    def each(self) -> Iterator[Part]:
        """Iterate over the parts in their order."""
        edges = pairwise(accumulate(self.spans_ns, initial=self.began_ns))
        return (Part(code, *edge) for code, edge in zip(self.codes, edges, strict=True))


class Step(NamedTuple):
    """One step: from the end of the previous step to its own end."""

    number: int | None
    """The number of the step, the same on all ranks; None if not recorded."""
    began_ns: int
    ended_ns: int
    parts: Parts
    """The parts from the start to the end of the step, without gaps. Of very many parts, only the
    first are stored one by one; the rest is stored as one sum per code."""
    gc_s: float
    skipped: bool
    retries: int
    work: int = 0
    """The number of tokens; without these the number of samples; 0 if both are unknown."""
    logged: int | None = None
    """The step number under which the user logs values, if that differs from `number`."""
    paced: tuple[int, ...] = ()
    """For steps by the device's clock: journal words, each with a phase and how long the host held
    the device up in it."""
    lag_ns: int | None = None
    """The device ended the step at least this long after its host; None by the host's clock."""
    profiled: bool = False
    calls: Calls | None = None
    collectives: Mapping[Collective, Sequence[int]] | None = None
    """By collective: the number of calls, and their bytes; None if the step has no such sums."""

    @property
    def took_ns(self) -> int:
        return self.ended_ns - self.began_ns

    @property
    def measured(self) -> bool:
        return UNMEASURED not in self.parts.codes

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Code and nanoseconds of each part."""
        return tuple(zip(self.parts.codes, self.parts.spans_ns, strict=True))
