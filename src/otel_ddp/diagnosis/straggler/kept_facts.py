"""Keeps the steps of very many ranks in a fifth of the memory that their records take."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.vocabulary.words import WORK_PHASES

_MANY = len(WORK_PHASES)
# Number, end, duration, wait, whether it was unusual, work; then the time in each phase.
_ON_HOST = struct.Struct(f"<4q?q{_MANY}q")
# And by the device's clock: for how long it kept up, what the host needed, how far it was behind.
_ON_DEVICE = struct.Struct(f"<4q?q{3 * _MANY + 1}q")
_NOT_KNOWN = -(1 << 63)


def kept(facts: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """One step of all ranks, for as long as the rule looks back."""
    if len(facts) < limits.MANY_RANKS:
        return facts
    try:
        return _KeptFacts(facts)
    except (struct.error, TypeError):
        # The clock of a device is known of some ranks only, or a number is beyond 64 bits.
        return facts


class _KeptFacts(Sequence[StepFacts]):
    """Packed; a record is made anew whenever it is asked for."""

    __slots__ = ("_layout", "_packed", "_unusual_ns")

    def __init__(self, facts: Sequence[StepFacts]) -> None:
        on_device = facts[0].paced_ns is not None
        self._layout = _ON_DEVICE if on_device else _ON_HOST
        pack = _packed_on_device if on_device else _packed_on_host
        self._packed = b"".join(map(pack, facts))
        # Hardly any step has one.
        self._unusual_ns = {i: each.unusual_ns for i, each in enumerate(facts) if each.unusual_ns}

    def __len__(self) -> int:
        return len(self._packed) // self._layout.size

    def __getitem__(self, i: Any) -> Any:
        return self._record(i, self._layout.unpack_from(self._packed, i * self._layout.size))

    def __iter__(self) -> Iterator[StepFacts]:
        for i, numbers in enumerate(self._layout.iter_unpack(self._packed)):
            yield self._record(i, numbers)

    def _record(self, i: int, numbers: tuple[int, ...]) -> StepFacts:
        number, ended_ns, took_ns, wait_ns, unusual, work, *more = numbers
        unusual_ns = self._unusual_ns.get(i, {})
        phases_ns = tuple(more[:_MANY])
        known = (number, ended_ns, took_ns, wait_ns, phases_ns, unusual_ns, bool(unusual), work)
        if self._layout is _ON_HOST:
            return StepFacts(*known)
        paced_ns, host_ns = tuple(more[_MANY : 2 * _MANY]), tuple(more[2 * _MANY : 3 * _MANY])
        behind_ns = None if more[-1] == _NOT_KNOWN else more[-1]
        return StepFacts(*known, paced_ns, host_ns, behind_ns)


def _packed_on_host(facts: StepFacts) -> bytes:
    number, ended_ns, took_ns, wait_ns, phases_ns, _, unusual, work, paced_ns, *_ = facts
    if paced_ns is not None:
        raise TypeError("one of them is on its device's clock")
    return _ON_HOST.pack(number, ended_ns, took_ns, wait_ns, unusual, work, *phases_ns)


def _packed_on_device(facts: StepFacts) -> bytes:
    number, ended_ns, took_ns, wait_ns, phases_ns, _, unusual, work, *_ = facts
    behind_ns = facts.behind_ns
    return _ON_DEVICE.pack(
        *(number, ended_ns, took_ns, wait_ns, unusual, work, *phases_ns),
        *(*(facts.paced_ns or ()), *(facts.host_ns or ())),
        _NOT_KNOWN if behind_ns is None else behind_ns,
    )
