"""Finds logged values of a process that were finite, and no longer are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from otel_ddp.diagnosis.detector import NonfiniteValue
from otel_ddp.journal.parser import Name, Scalars

# A single infinite gradient norm is normal while AMP searches for its loss scale. So a non-finite
# value is reported only if another one follows, or if no value follows within this time.
_WITHOUT_SUCCESSOR_NS = 60 * 10**9


class _Lost(NamedTuple):
    """The first non-finite value of a name after its last finite value."""

    value: float
    record: Scalars
    finite_step: int | None
    seen_ns: int
    """When the value was read; 0 if another non-finite value has followed."""


class NonfiniteValues:
    """Watches the values of one process for names whose values are no longer finite."""

    def __init__(self) -> None:
        # The step of each name's last finite value, by the name's number in the journal.
        self._finite: dict[int, int | None] = {}
        self._lost: dict[int, _Lost] = {}

    def feed(self, records: Iterable[Scalars], now_ns: int) -> None:
        """Add new records."""
        finite, lost, isfinite = self._finite, self._lost, math.isfinite
        for record in records:
            step = record.step
            for name, value in zip(record.names, record.values, strict=True):
                if isfinite(value):
                    finite[name] = step
                    if lost:
                        lost.pop(name, None)
                elif name in self._lost:
                    self._lost[name] = self._lost[name]._replace(seen_ns=0)
                elif name in self._finite:
                    self._lost[name] = _Lost(value, record, self._finite[name], now_ns)

    def find(
        self, names: Mapping[int, Name], now_ns: int, ended: bool = False
    ) -> list[NonfiniteValue]:
        """The non-finite values to report. A new one without a successor is not among them, since
        it may be normal."""
        return [
            NonfiniteValue(
                named.text,
                named.split,
                lost.value,
                lost.record.step,
                lost.record.time_ns,
                lost.finite_step,
            )
            for name, lost in self._lost.items()
            if (named := names.get(name)) is not None
            and (ended or now_ns - lost.seen_ns >= _WITHOUT_SUCCESSOR_NS)
        ]
