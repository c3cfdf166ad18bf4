"""Asks NVML about one board, or a part of one (a MIG instance), what the table has."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from otel_ddp.agent.node.gpu.nvml_table import (
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
from otel_ddp.vocabulary.catalog import OTEL_DDP_GPU_XID_ERRORS, Kind


class NotSupported(Exception):
    """This device does not support that: it is never asked for it again."""


class DeviceLost(Exception):
    """The device, or the whole driver, is lost: devices have to be found anew."""


class Question(NamedTuple):
    """A question that one device is asked again and again."""

    name: str
    ask: Callable[[], Iterable[Measurement]]
    """Raises NotSupported or DeviceLost; any other error means that one attempt failed. An
    impossible number is NaN: it is left out."""


# -- one device

# Numbers of the binary interface: an older nvidia-ml-py lacks some of the names.
SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25

_ABSENT = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH}
_LOST = {UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED}

# Of each value type: the member of the union, and what says that there is no number.
_MEMBERS = {
    0: ("dVal", None),
    1: ("uiVal", U32),
    2: ("ulVal", 2**64 - 1),
    3: ("ullVal", 2**64 - 1),
    4: ("sllVal", -1),
    5: ("siVal", -1),
    6: ("usVal", None),
}
_IN_32_BITS = 1
_LONGEST_TEXT = 100


def printable(text: str | bytes) -> str:
    """A driver's text, made fit for a label."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    text = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(text.split())[:_LONGEST_TEXT]


def words(ask: Callable[[], str | bytes]) -> str:
    try:
        return printable(ask())
    except UnicodeDecodeError as error:
        # nvidia-ml-py insists on UTF-8; the vendor of a board may not.
        return printable(error.object)


class Calls:
    """One device of NVML: calls functions by name, and raises our own exceptions."""

    def __init__(self, lib: Any, handle: Any, board: Calls | None = None) -> None:
        """*board*: of a MIG instance, which has a number there."""
        self.lib = lib
        self.handle = handle
        self.board = board or self
        self.instance: int | None = None

    def ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self.lib, function, None)
        if call is None:
            raise NotSupported(f"this nvidia-ml-py has no {function}")
        return self.guarded(lambda: call(self.handle, *arguments))

    def words(self, function: str) -> str:
        return words(lambda: self.ask(function))

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Any other error than ours means that only this attempt failed."""
        try:
            return call()
        except self.lib.NVMLError as error:
            if error.value in _ABSENT:
                raise NotSupported(printable(str(error))) from error
            if error.value in _LOST:
                raise DeviceLost(printable(str(error))) from error
            if error.value != INVALID_ARGUMENT:
                raise
            # Either this device has no such number, or a driver reload made the handle invalid.
            try:
                self.lib.nvmlDeviceGetUUID(self.handle)
            except self.lib.NVMLError:
                raise DeviceLost("the driver no longer knows the device") from error
            raise NotSupported(printable(str(error))) from error

    def fields(self, fields: Sequence[Field]) -> dict[Field, float | None]:
        """Those that the device may have, in one call; None: it could not be read this time."""
        asked = [(each.number, each.scope) for each in fields]
        found: dict[Field, float | None] = {}
        for field, answer in zip(fields, self.ask("nvmlDeviceGetFieldValues", asked), strict=True):
            code, kind = answer.nvmlReturn, answer.valueType
            if code in _LOST:
                raise DeviceLost(printable(str(self.lib.NVMLError(code))))
            # A driver older than a field answers that the argument is invalid.
            if code in _ABSENT or code == INVALID_ARGUMENT:
                continue
            if code != SUCCESS or kind not in _MEMBERS:
                found[field] = None
            elif not (field.wide and kind == _IN_32_BITS):
                member, absent = _MEMBERS[kind]
                value = getattr(answer.value, member)
                # Infinity is beyond the bounds of every metric.
                found[field] = math.inf if value == absent else float(value)
        return found


# -- faults

_XID_EVENT = 8
# Many faults at once must not delay the other questions.
_MOST_AT_ONCE = 100


class Xids:
    """Counts the faults of one board; kept while its handles are closed by the worst of them."""

    def __init__(self, pci: str, since_ns: int) -> None:
        self._pci = pci
        self._since_ns = since_ns
        # A code begins with its first fault: there are two hundred, and most boards have none.
        self.codes: Counter[int] = Counter()
        self.calls: Calls | None = None
        # A set of events of its own, because NVML's handles cannot be compared.
        self._events: Any = None

    def ask(self) -> list[Measurement]:
        if self.calls is not None:
            if self._events is None:
                self._events = self._register(self.calls)
            lib = self.calls.lib
            self.calls.guarded(lambda: self._drain(lib))
        pci, metric = ("pci", self._pci), OTEL_DDP_GPU_XID_ERRORS
        return [
            Measurement(metric, times, (pci, ("code", str(code))), self._since_ns)
            for code, times in sorted(self.codes.items())
        ]

    def _register(self, calls: Calls) -> Any:
        events = calls.guarded(calls.lib.nvmlEventSetCreate)
        with contextlib.ExitStack() as on_error:
            on_error.callback(calls.lib.nvmlEventSetFree, events)
            calls.ask("nvmlDeviceRegisterEvents", _XID_EVENT, events)
            on_error.pop_all()  # registered: the set stays open
        return events

    def _drain(self, lib: Any) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                event = lib.nvmlEventSetWait(self._events, 0)
            except lib.NVMLError as error:
                if error.value == TIMEOUT:
                    return
                raise
            if event.eventType & _XID_EVENT:
                self.codes[int(event.eventData)] += 1

    def close(self) -> None:
        """Count the last faults, then free the set."""
        if self.calls is not None and self._events is not None:
            lib = self.calls.lib
            with contextlib.suppress(lib.NVMLError):
                self._drain(lib)
            with contextlib.suppress(lib.NVMLError):
                lib.nvmlEventSetFree(self._events)
        self.calls = self._events = None


# -- engines

_VERSION = 1


class GpmSamples:
    """Each read covers the time since the one before; the first one returns nothing."""

    def __init__(
        self, calls: Calls, clock: Callable[[], float], wall_ns: Callable[[], int]
    ) -> None:
        # The calls for a MIG instance go to its board.
        self._calls = calls.board
        self._clock = clock
        self._wall_ns = wall_ns
        instance = calls.instance
        self._get = ("nvmlGpmSampleGet",) if instance is None else ("nvmlGpmMigSampleGet", instance)
        self.numbers: dict[Series, int] = {}
        """What is read, by the numbers that NVML gives it."""
        self._before: Any = None
        self._before_s = 0.0
        self._spare: Any = None
        self._counted: dict[Series, float] = defaultdict(float)
        self._since_ns = 0

    def ask(self) -> Iterable[Measurement]:
        if self._spare is None:
            self._spare = self._calls.guarded(self._calls.lib.nvmlGpmSampleAlloc)
        self._calls.ask(*self._get, self._spare)
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


# -- rows of the table

_LINK_COUNT = Field(91)
_MOST_LINKS = 72


def questions(calls: Calls, pci: str, loaded_ns: int, gpm: GpmSamples | None) -> list[Question]:
    """*loaded_ns*: about since when the driver counts. *gpm*: None if the board lacks it."""
    rows = [row for row in ROWS if row.of_parts or calls.instance is None]
    every_way = [way for row in rows for each in row.series.values() for way in each]
    fields = _supported(calls, [way for way in every_way if isinstance(way, Fields)])
    parts: dict[tuple[Any, ...], dict[Series, Call]] = defaultdict(dict)
    sums: dict[Series, Fields] = {}
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
                sums[series] = fields[way]
            elif isinstance(way, Call):
                functions = tuple(each.function for each in here if isinstance(each, Call))
                parts[functions][series] = way
            elif gpm is not None:
                gpm.numbers[series] = way.number
    asked = [Question("engines", gpm.ask)] if gpm is not None else []
    for functions, each in parts.items():
        ask = partial(_ask_call, calls, list(functions), each)
        asked.append(Question(functions[0][0], ask))
    if sums:
        asked.append(Question("fields", partial(_ask_fields, calls, sums)))
    return asked


def _has(way: Way, fields: dict[Fields, Fields], gpm: GpmSamples | None) -> bool:
    """Whether the board has it; of a call that shows only when it is asked."""
    return way in fields if isinstance(way, Fields) else not isinstance(way, Gpm) or gpm is not None


def _supported(calls: Calls, wanted: Sequence[Fields]) -> dict[Fields, Fields]:
    """Those that the board has, with all of their links and without the fields that it lacks."""
    if not wanted:
        return {}
    try:
        count = calls.fields([_LINK_COUNT]).get(_LINK_COUNT) or 0
        links = range(int(count) if count <= _MOST_LINKS else 0)
        every = {
            way: [each._replace(scope=n) for each in way.fields for n in links]
            if way.links
            else way.fields
            for way in wanted
        }
        has = calls.fields([field for each in every.values() for field in each])
    except NotSupported:
        return {}
    found = {way: tuple(f for f in each if f in has) for way, each in every.items()}
    return {way: way._replace(fields=each) for way, each in found.items() if each}


def _ask_call(
    calls: Calls, functions: list[tuple[Any, ...]], parts: dict[Series, Call]
) -> list[Measurement]:
    """Call the first function that the board supports; all answer alike. Its parts are series."""
    try:
        answer = calls.ask(*functions[0])
    except NotSupported:
        if len(functions) == 1:
            raise
        del functions[0]
        return _ask_call(calls, functions, parts)
    return [series.measurement(_part(answer, way)) for series, way in parts.items()]


def _part(answer: Any, way: Call) -> float:
    if way.bit:
        # Of a mask with more bits than there are, nothing can be believed.
        return bool(answer & way.bit) if answer <= U32 else math.nan
    if isinstance(way.part, str):
        return float(getattr(answer, way.part))
    return float(answer if way.part is None else answer[way.part])


def _ask_fields(calls: Calls, sums: dict[Series, Fields]) -> list[Measurement]:
    """Read all fields, in one call."""
    found = calls.fields([field for way in sums.values() for field in way.fields])
    measurements = []
    for series, way in sums.items():
        values = [found.get(field) for field in way.fields]
        known = [value for value in values if value is not None]
        # A sum without one part would fall, which looks like a reset of the counter.
        if len(known) == len(values):
            measurements.append(series.measurement(sum(known) * way.times))
    return measurements
