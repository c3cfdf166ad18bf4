"""Sums up what falls into one bucket: logged values, samples of the node, steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from otel_ddp.history.schema import STEP_COLUMNS, SUM_COLUMNS
from otel_ddp.words import PHASE_CODE, PHASES

_CODES = len(PHASES)


class ValueSum:
    """Of the values of one series."""

    __slots__ = SUM_COLUMNS

    def __init__(self, position: int, time_ns: int) -> None:
        self.first = self.until = position
        self.first_ns = self.last_ns = time_ns
        self.finite = self.nonfinite = 0
        self.total = 0.0
        self.low: float | None = None
        self.high: float | None = None
        self.last: float | None = None
        self.epoch: float | None = None

    def add(self, position: int, time_ns: int, value: float, epoch: float | None) -> None:
        """One more value. *position*: the step, or whatever the series is counted by."""
        if position < self.first:
            self.first = position
        if position > self.until:
            self.until = position
        if time_ns < self.first_ns:
            self.first_ns = time_ns
        if math.isfinite(value):
            self.finite += 1
            self.total += value
            if self.low is None or value < self.low:
                self.low = value
            if self.high is None or value > self.high:
                self.high = value
        else:
            self.nonfinite += 1
        if time_ns >= self.last_ns:
            self.last_ns = time_ns
            # SQLite has no NaN: it keeps NULL.
            self.last = value
            self.epoch = epoch if epoch is not None else self.epoch

    def row(self) -> tuple[Any, ...]:
        """In the order of the columns."""
        return tuple(getattr(self, column) for column in SUM_COLUMNS)


class StepSum:
    """Of the steps of one rank, by one clock."""

    __slots__ = (*STEP_COLUMNS[:10], "phases_ns")

    def __init__(self, position: int, began_ns: int) -> None:
        self.first = self.until = position
        self.first_ns, self.last_ns = began_ns, 0
        self.steps = self.took_ns = self.high_ns = self.unusual = self.work = 0
        self.low_ns = 1 << 62
        self.phases_ns = [0] * _CODES

    def add(
        self,
        position: int,
        began_ns: int,
        ended_ns: int,
        spans: Sequence[tuple[int, int]],
        work: int,
        unusual: bool,
    ) -> None:
        """One more step. *spans*: phase codes of the journal, and nanoseconds."""
        self.first = min(self.first, position)
        self.until = max(self.until, position)
        self.first_ns = min(self.first_ns, began_ns)
        self.last_ns = max(self.last_ns, ended_ns)
        took_ns = ended_ns - began_ns
        self.steps += 1
        self.took_ns += took_ns
        self.low_ns = min(self.low_ns, took_ns)
        self.high_ns = max(self.high_ns, took_ns)
        self.work += work
        self.unusual += unusual
        phases_ns = self.phases_ns
        for code, span_ns in spans:
            phase = code & PHASE_CODE
            # A phase of a later version is told as "other".
            phases_ns[phase if phase < _CODES else 0] += span_ns

    def row(self) -> tuple[Any, ...]:
        """In the order of the columns."""
        return (*(getattr(self, column) for column in STEP_COLUMNS[:10]), *self.phases_ns)
