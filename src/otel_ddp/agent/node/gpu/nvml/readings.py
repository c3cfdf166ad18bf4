"""Reads the rows of the table from one board, or from a part of one (a MIG instance)."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.node.gpu.driver import NotSupported, Question
from otel_ddp.agent.node.gpu.nvml.calls import SUCCESS, Calls, FieldValue
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
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary.catalog import Kind

_VERSION = 1


class GpmSamples:
    """Each read covers the time since the one before; the first one returns nothing."""

    def __init__(
        self,
        calls: Calls,
        *,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        instance: int | None = None,
    ) -> None:
        """*instance*: of a MIG instance, whose calls go to its board."""
        self._calls = calls
        self._clock = clock
        self._wall_ns = wall_ns
        self._instance = instance
        self.numbers: dict[Series, int] = {}
        """What is read, by the numbers that NVML gives it."""
        self._before: Any = None
        self._before_s = 0.0
        self._spare: Any = None
        self._counted: dict[Series, float] = defaultdict(float)
        self._since_ns = 0

    def ask(self) -> Iterable[Measurement]:
        lib = self._calls.lib
        if self._spare is None:
            self._spare = self._calls.guarded(lib.nvmlGpmSampleAlloc)
        if self._instance is None:
            self._calls.ask("nvmlGpmSampleGet", self._spare)
        else:
            self._calls.ask("nvmlGpmMigSampleGet", self._instance, self._spare)
        now_s = self._clock()
        self._since_ns = self._since_ns or self._wall_ns()
        found = {} if self._before is None else self._between(self._before, self._spare)
        elapsed_s = now_s - self._before_s
        self._before, self._spare, self._before_s = self._spare, self._before, now_s
        return [self._measurement(series, raw, elapsed_s) for series, raw in found.items()]

    def _between(self, before: Any, after: Any) -> dict[Series, float]:
        lib = self._calls.lib
        asked = lib.c_nvmlGpmMetricsGet_t()
        asked.version = _VERSION
        asked.numMetrics = len(self.numbers)
        asked.sample1, asked.sample2 = before, after
        for slot, number in enumerate(self.numbers.values()):
            asked.metrics[slot].metricId = number
        self._calls.guarded(lambda: lib.nvmlGpmMetricsGet(asked))
        return {
            series: asked.metrics[slot].value
            for slot, series in enumerate(self.numbers)
            if asked.metrics[slot].nvmlReturn == SUCCESS
        }

    def _measurement(self, series: Series, raw: float, elapsed_s: float) -> Measurement:
        measurement = series.measurement(raw)
        if series.metric.kind is not Kind.COUNTER:
            return measurement
        # NVML gives the rate. One that cannot be is NaN, and is not added.
        moved = measurement.value * elapsed_s
        if moved >= 0:
            self._counted[series] += moved
            moved = self._counted[series]
        return measurement._replace(value=moved, start_ns=self._since_ns)

    def close(self) -> None:
        """Free the samples. Call it only while NVML is open."""
        lib = self._calls.lib
        for sample in (self._before, self._spare):
            if sample is not None:
                with contextlib.suppress(lib.NVMLError):
                    lib.nvmlGpmSampleFree(sample)


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
            errors.warn_once(
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
