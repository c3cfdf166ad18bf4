"""Calls NVML for one GPU: values, faults, engine activity."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from otel_ddp.agent.node.nvml_table import U32, Field, Gpm
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary.catalog import OTEL_DDP_GPU_XID_ERRORS


class NotSupported(Exception):
    """The device does not support this call."""


class DeviceLost(Exception):
    """The device or the whole driver is lost, so the devices have to be listed again."""


# -- one device

# NVML's return codes. They are numbers here because older versions of nvidia-ml-py lack some of
# their names.
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
ARGUMENT_VERSION_MISMATCH = 25

# Return codes for an unsupported call. INVALID_ARGUMENT is one of them, because old drivers return
# it for fields that they don't know.
_ABSENT = {
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    NO_PERMISSION,
    FUNCTION_NOT_FOUND,
    ARGUMENT_VERSION_MISMATCH,
}
_LOST = {UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED}

# For each type code of a field's value: the member of NVML's union with the value, and the value
# that means "not available".
_MEMBERS = {1: ("uiVal", U32), 2: ("ulVal", 2**64 - 1), 3: ("ullVal", 2**64 - 1)}
_IN_32_BITS = 1


class Calls:
    """Calls functions of NVML for one device. Raises NotSupported and DeviceLost for its errors."""

    def __init__(self, lib: Any, handle: Any) -> None:
        self.lib = lib
        self.handle = handle

    def ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self.lib, function, None)
        if call is None:
            raise NotSupported(f"this nvidia-ml-py has no {function}")
        return self.guarded(lambda: call(self.handle, *arguments))

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Run *call*. Raises NotSupported, DeviceLost, or NVMLError if a retry may succeed."""
        try:
            return call()
        except self.lib.NVMLError as error:
            if error.value in _ABSENT:
                raise NotSupported(str(error)) from error
            if error.value in _LOST:
                raise DeviceLost(str(error)) from error
            raise

    def fields(self, fields: Sequence[Field]) -> dict[Field, float | None]:
        """Read fields in one call. The result has no unsupported fields; a failed one is None."""
        asked = [(each.number, each.scope) for each in fields]
        found: dict[Field, float | None] = {}
        for field, answer in zip(fields, self.ask("nvmlDeviceGetFieldValues", asked), strict=True):
            code, kind = answer.nvmlReturn, answer.valueType
            if code in _LOST:
                raise DeviceLost(str(self.lib.NVMLError(code)))
            if code in _ABSENT:
                continue
            if code != SUCCESS or kind not in _MEMBERS:
                found[field] = None
            elif not (field.wide and kind == _IN_32_BITS):
                member, absent = _MEMBERS[kind]
                value = getattr(answer.value, member)
                # Return infinity for "not available": it is outside the valid range of any metric.
                found[field] = math.inf if value == absent else float(value)
        return found


# -- faults

_XID_EVENT = 8
# How many faults to read at once, so that a burst of faults does not delay the other calls.
_MOST_AT_ONCE = 100


class Xids:
    """Counts the faults (Xids) of one GPU. It is kept when the GPU's NVML handle is closed."""

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        # Faults by Xid code.
        self._codes: Counter[int] = Counter()
        self._lib: Any = None
        # NVML's event set. Each GPU has its own set: an event has a GPU handle, but it can't be
        # compared with other handles, so a shared set could not tell which GPU failed.
        self._events: Any = None

    def poll(self, calls: Calls) -> None:
        """Count new faults."""
        self._lib = calls.lib
        if self._events is None:
            self._events = self._register(calls)
        calls.guarded(self._drain)

    def measurements(self, pci: str) -> list[Measurement]:
        """The counts by code. *pci*: the PCI address of the GPU."""
        return [
            Measurement(
                OTEL_DDP_GPU_XID_ERRORS, times, (("pci", pci), ("code", str(code))), self._since_ns
            )
            for code, times in sorted(self._codes.items())
        ]

    def _register(self, calls: Calls) -> Any:
        events = calls.guarded(calls.lib.nvmlEventSetCreate)
        with contextlib.ExitStack() as on_error:
            on_error.callback(calls.lib.nvmlEventSetFree, events)
            calls.ask("nvmlDeviceRegisterEvents", _XID_EVENT, events)
            on_error.pop_all()  # the events are registered, so don't free the set
        return events

    def _drain(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                event = self._lib.nvmlEventSetWait(self._events, 0)
            except self._lib.NVMLError as error:
                if error.value == TIMEOUT:
                    return
                raise
            if event.eventType & _XID_EVENT:
                self._codes[int(event.eventData)] += 1

    def close(self) -> None:
        """Count the last faults, then free the event set."""
        if self._events is not None:
            with contextlib.suppress(self._lib.NVMLError):
                self._drain()
            with contextlib.suppress(self._lib.NVMLError):
                self._lib.nvmlEventSetFree(self._events)
        self._events = None


# -- engine activity

_VERSION = 1
_MIB = 1 << 20


class GpmSamples:
    """Samples of GPM (GPU performance monitoring).

    Each read returns values for the time since the last read, so the first read returns nothing.
    """

    def __init__(
        self, calls: Calls, clock: Callable[[], float], wall_ns: Callable[[], int]
    ) -> None:
        """Raises NotSupported if the GPU has no GPM."""
        if not calls.ask("nvmlGpmQueryDeviceSupport").isSupportedDevice:
            raise NotSupported("this board has no GPM")
        self._calls = calls
        self._clock = clock
        self._before: Any = None
        self._before_s = 0.0
        self._spare: Any = None
        self._counted: dict[Gpm, float] = defaultdict(float)
        self.since_ns = wall_ns()

    def read(self, wanted: Sequence[Gpm]) -> dict[Gpm, float]:
        """Read these metrics. A metric with `counts` is a rate, which is integrated over time to a
        total since `since_ns`."""
        if self._spare is None:
            self._spare = self._calls.guarded(self._calls.lib.nvmlGpmSampleAlloc)
        self._calls.ask("nvmlGpmSampleGet", self._spare)
        now_s = self._clock()
        found = {} if self._before is None else self._between(wanted, self._before, self._spare)
        for each in found:
            if each.counts:
                # Count an invalid rate, negative or NaN, as 0.
                rate = max(0.0, found[each])
                self._counted[each] += rate * (now_s - self._before_s) * _MIB
                found[each] = self._counted[each]
        self._before, self._spare, self._before_s = self._spare, self._before, now_s
        return found

    def _between(self, wanted: Sequence[Gpm], before: Any, after: Any) -> dict[Gpm, float]:
        lib = self._calls.lib
        asked = lib.c_nvmlGpmMetricsGet_t()
        asked.version = _VERSION
        asked.numMetrics = len(wanted)
        asked.sample1, asked.sample2 = before, after
        for slot, each in enumerate(wanted):
            asked.metrics[slot].metricId = each.number
        self._calls.guarded(lambda: lib.nvmlGpmMetricsGet(asked))
        return {
            each: asked.metrics[slot].value
            for slot, each in enumerate(wanted)
            if asked.metrics[slot].nvmlReturn == SUCCESS
        }

    def close(self) -> None:
        """Free the samples. Call it only while NVML is open."""
        lib = self._calls.lib
        for sample in (self._before, self._spare):
            if sample is not None:
                with contextlib.suppress(lib.NVMLError):
                    lib.nvmlGpmSampleFree(sample)
