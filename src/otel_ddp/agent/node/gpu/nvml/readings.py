"""Reads the rows of the table from one board, or from a part of one (a MIG instance)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from otel_ddp.agent.node.gpu.driver import NotSupported, Question
from otel_ddp.agent.node.gpu.nvml.calls import Calls, FieldValue
from otel_ddp.agent.node.gpu.nvml.gpm import GpmSamples
from otel_ddp.agent.node.gpu.nvml.table import (
    MOVING_S,
    ROWS,
    U32,
    Call,
    Field,
    Fields,
    Gpm,
    Series,
    Way,
)
from otel_ddp.agent.node.measurement import Measurement
from otel_ddp.catalog import Kind
from otel_ddp.errors import containment

_LINK_COUNT = Field(91)
_MOST_LINKS = 72


def questions(
    calls: Calls, pci: str, loaded_ns: int, gpm: GpmSamples | None, *, part: bool
) -> list[Question]:
    """*loaded_ns*: about since when the driver counts. *gpm*: None if the board lacks it."""
    rows = [row for row in ROWS if row.of_parts or not part]
    every_way = [way for row in rows for each in row.series.values() for way in each]
    fields = _supported(calls, [way for way in every_way if isinstance(way, Fields)])
    calling: dict[tuple[float, tuple[Any, ...]], _CallQuestion] = {}
    batches: dict[float, _FieldsQuestion] = {}
    chosen = set()
    for row in rows:
        start_ns = loaded_ns if row.metric.kind is Kind.COUNTER else 0
        for word, ways in row.series.items():
            here = [way for way in ways if _has(way, fields, gpm)]
            if not here or (row.metric, word) in chosen:
                continue
            chosen.add((row.metric, word))
            series, way = Series(row.metric, word, row.unit, pci, start_ns), here[0]
            if isinstance(way, Fields):
                batch = batches.setdefault(row.every_s, _FieldsQuestion(calls))
                batch.sums[series] = fields[way]
            elif isinstance(way, Call):
                functions = tuple(each.function for each in here if isinstance(each, Call))
                question = _CallQuestion(calls, functions)
                calling.setdefault((row.every_s, functions), question).parts[series] = way
            elif gpm is not None:
                gpm.numbers[series] = way.number
    asked = [Question("engines", MOVING_S, gpm.ask)] if gpm is not None else []
    asked += [Question(key[1][0][0], key[0], each.ask) for key, each in calling.items()]
    asked += [Question(f"fields every {s:g} s", s, each.ask) for s, each in batches.items()]
    return asked


def _has(way: Way, fields: dict[Fields, Fields], gpm: GpmSamples | None) -> bool:
    """Whether the board has it; of a call that shows only when it is asked."""
    return way in fields if isinstance(way, Fields) else not isinstance(way, Gpm) or gpm is not None


def _supported(calls: Calls, wanted: Sequence[Fields]) -> dict[Fields, Fields]:
    """Those that the board has, with all of their links and without the fields that it lacks."""
    if not wanted:
        return {}
    links = range(_links(calls))
    every = {
        way: [Field(f.number, n) for f in way.fields for n in links] if way.links else way.fields
        for way in wanted
    }
    has = calls.supported([field for each in every.values() for field in each])
    found = {way: tuple(f for f in each if f in has) for way, each in every.items()}
    return {way: way._replace(fields=each) for way, each in found.items() if each}


def _links(calls: Calls) -> int:
    try:
        found = calls.fields([_LINK_COUNT])
    except NotSupported:
        return 0
    count = found[_LINK_COUNT].value if _LINK_COUNT in found else 0
    return int(count) if count <= _MOST_LINKS else 0


class _CallQuestion:
    """A function, and the series that are parts of its answer."""

    def __init__(self, calls: Calls, functions: Sequence[tuple[Any, ...]]) -> None:
        """*functions*: the first that the board supports is called; all answer alike."""
        self._calls = calls
        self._functions = list(functions)
        self.parts: dict[Series, Call] = {}

    def ask(self) -> Iterable[Measurement]:
        answer = self._answer()
        return [series.measurement(_part(answer, way)) for series, way in self.parts.items()]

    def _answer(self) -> Any:
        try:
            return self._calls.ask(*self._functions[0])
        except NotSupported:
            if len(self._functions) == 1:
                raise
            self._functions.pop(0)
            return self._answer()


def _part(answer: Any, way: Call) -> float:
    if way.bit:
        # Of a mask with more bits than there are, nothing can be believed.
        return bool(answer & way.bit) if answer <= U32 else math.nan
    if isinstance(way.part, str):
        return float(getattr(answer, way.part))
    return float(answer if way.part is None else answer[way.part])


class _FieldsQuestion:
    """All fields of one period, in one call."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.sums: dict[Series, Fields] = {}
        self._before: dict[Series, float] = {}

    def ask(self) -> Iterable[Measurement]:
        measurements = []
        found = self._found()
        for series, way in self.sums.items():
            # A sum without one part would fall, which looks like a reset of the counter.
            if all(field in found for field in way.fields):
                total = sum(found[field].value for field in way.fields) * way.times
                measurements.append(series.measurement(total))
        return measurements

    def _found(self) -> dict[Field, FieldValue]:
        wanted = [field for way in self.sums.values() for field in way.fields]
        if not wanted:
            raise NotSupported("32 bits")
        found = self._calls.fields(wanted)
        if any(self._wraps(series, way, found) for series, way in self.sums.items()):
            containment.warn_once(
                "gpu 32 bits",
                "GPU: the driver counts bytes on PCIe in 32 bits, which are full within a second: "
                "they are not shown.",
            )
            self.sums = {series: way for series, way in self.sums.items() if not way.wide}
        return found

    def _wraps(self, series: Series, way: Fields, found: dict[Field, FieldValue]) -> bool:
        """Whether this counter has only 32 bits, by its type or because it fell.

        It may wrap several times between two reads, which cannot be corrected: the busiest boards
        would look idle.
        """
        if not way.wide or way.fields[0] not in found:
            return False
        value, narrow = found[way.fields[0]]
        before, self._before[series] = self._before.get(series, 0.0), value
        return narrow or value < before <= U32
