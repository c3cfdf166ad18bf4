"""Finds the logged values of a process that became NaN or infinite, and when each did."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from otel_ddp.diagnosis.nonfinite import NonfiniteValue
from otel_ddp.journal.reader import JournalReader, Scalars, Unreadable

# A single infinite gradient norm is part of finding a loss scale. Two in a row are not, nor is one
# without a successor for so long.
_WITHOUT_SUCCESSOR_NS = 60 * 10**9


class _Logged(NamedTuple):
    value: float
    record: Scalars


class _First(NamedTuple):
    """The first value of a name that was not finite, after one that was."""

    logged: _Logged
    seen_ns: int
    finite_step: int | None


class NonfiniteValues:
    """The values of one process: it checks the last of each name, and reads more on suspicion."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        # Everything before this position has been checked.
        self._position = 0
        # By name: the step of its last finite value.
        self._finite: dict[int, int | None] = {}
        # By name; None where no value was ever finite, so that none changed.
        self._first: dict[int, _First | None] = {}

    def find(self, now_ns: int, ended: bool = False) -> list[NonfiniteValue]:
        """The names whose values were finite once, and no longer are."""
        reader = self._reader
        last = _last(reader.latest())
        nonfinite = {name for name, each in last.items() if not math.isfinite(each.value)}
        self._finite |= {n: each.record.step for n, each in last.items() if n not in nonfinite}
        self._first = {name: first for name, first in self._first.items() if name in nonfinite}
        fresh = nonfinite - self._first.keys()
        if fresh:
            # Where the beginning is overwritten, the last value stands for it.
            began = {name: last[name] for name in fresh} | self._began(fresh)
            for name in fresh:
                known = name in self._finite
                self._first[name] = (
                    _First(began[name], now_ns, self._finite[name]) if known else None
                )
        self._position = reader.position
        return [
            NonfiniteValue(
                *(named.text, named.split, logged.value, logged.record.step),
                *(logged.record.time_ns, first.finite_step),
            )
            for name, first in self._first.items()
            if first is not None and (named := reader.names.get(name)) is not None
            for logged in [first.logged]
            if ended
            or last[name].record.position > logged.record.position
            or now_ns - first.seen_ns >= _WITHOUT_SUCCESSOR_NS
        ]

    def _began(self, names: set[int]) -> dict[int, _Logged]:
        """For each of these names: the first value after the last finite one."""
        try:
            # The agent's own reader is already past these records.
            again = JournalReader(self._reader.path)
        except Unreadable:
            return {}
        try:
            again.position = self._position
            records = again.read()
        finally:
            again.close()
        began: dict[int, _Logged] = {}
        for record in records:
            if not isinstance(record, Scalars):
                continue
            for name, value in record.values:
                if math.isfinite(value):
                    self._finite[name] = record.step
                    began.pop(name, None)
                elif name in names:
                    began.setdefault(name, _Logged(value, record))
        return began


def _last(records: Iterable[Scalars]) -> dict[int, _Logged]:
    ordered = sorted(records, key=lambda record: record.position)
    return {name: _Logged(value, record) for record in ordered for name, value in record.values}
