"""Finds which of the values that a process logs are not finite any more, and since when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from otel_ddp.diagnosis.nonfinite import Odd
from otel_ddp.journal.reader import JournalReader, Scalars, Unreadable

# One infinite gradient norm is part of looking for a loss scale: two in a row are not, nor is one
# that nothing has come after for so long.
_STANDS_NS = 60 * 10**9


class _Told(NamedTuple):
    value: float
    record: Scalars


class _First(NamedTuple):
    """The first value of a name that was not finite, after one that was."""

    told: _Told
    seen_ns: int


class NonfiniteValues:
    """One process's, looked at now and then: the last of each name, and more only on suspicion."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        # Up to here all has been looked at.
        self._position = 0
        self._finite: set[int] = set()
        # By name; None where there was never a finite value, and so nothing that changed.
        self._first: dict[int, _First | None] = {}

    def odd(self, now_ns: int, ended: bool = False) -> list[Odd]:
        """Names whose values were finite once, and are not any more."""
        reader = self._reader
        last = _last(reader.latest())
        odd = {name for name, told in last.items() if not math.isfinite(told.value)}
        self._finite |= last.keys() - odd
        self._first = {name: first for name, first in self._first.items() if name in odd}
        fresh = odd - self._first.keys()
        if fresh:
            # What is no longer to be read began with what is there.
            began = {name: last[name] for name in fresh} | self._began(fresh)
            for name in fresh:
                known = name in self._finite
                self._first[name] = _First(began[name], now_ns) if known else None
        self._position = reader.position
        return [
            Odd(said.text, said.split, told.value, told.record.step, told.record.time_ns)
            for name, first in self._first.items()
            if first is not None and (said := reader.names.get(name)) is not None
            for told in [first.told]
            if ended
            or last[name].record.position > told.record.position
            or now_ns - first.seen_ns >= _STANDS_NS
        ]

    def _began(self, names: set[int]) -> dict[int, _Told]:
        """With which value each of these names began not to be finite."""
        try:
            # The agent's own reader has passed this by.
            again = JournalReader(self._reader.path)
        except Unreadable:
            return {}
        try:
            again.position = self._position
            records = again.read()
        finally:
            again.close()
        began: dict[int, _Told] = {}
        for record in records:
            if not isinstance(record, Scalars):
                continue
            for name, value in record.values:
                if math.isfinite(value):
                    self._finite.add(name)
                    began.pop(name, None)
                elif name in names:
                    began.setdefault(name, _Told(value, record))
        return began


def _last(records: Iterable[Scalars]) -> dict[int, _Told]:
    ordered = sorted(records, key=lambda record: record.position)
    return {name: _Told(value, record) for record in ordered for name, value in record.values}
