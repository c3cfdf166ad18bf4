"""Counts the faults (Xid) that the driver reports of one board, without waiting for them."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from otel_ddp.agent.node.gpu.nvml.calls import TIMEOUT, Calls
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary.catalog import OTEL_DDP_GPU_XID_ERRORS

_XID_EVENT = 8
# Many faults at once must not delay the other questions.
_MOST_AT_ONCE = 100


class XidCounts:
    """The faults of one board; kept when its handles are closed, as the worst fault does that."""

    def __init__(self, pci: str, since_ns: int) -> None:
        self._pci = pci
        self._since_ns = since_ns
        # A code begins with its first fault: there are two hundred, and most boards have none.
        self.codes: Counter[int] = Counter()

    def measurements(self) -> list[Measurement]:
        pci, metric = ("pci", self._pci), OTEL_DDP_GPU_XID_ERRORS
        return [
            Measurement(metric, times, (pci, ("code", str(code))), self._since_ns)
            for code, times in sorted(self.codes.items())
        ]


class XidWatch:
    """One set of events for each board, because NVML's handles cannot be compared."""

    def __init__(self, calls: Calls, counts: XidCounts) -> None:
        self._calls = calls
        self._counts = counts
        self._events: Any = None

    def ask(self) -> list[Measurement]:
        if self._events is None:
            self._events = self._register()
        self._calls.guarded(self._drain)
        return self._counts.measurements()

    def _register(self) -> Any:
        events = self._calls.guarded(self._calls.lib.nvmlEventSetCreate)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._calls.lib.nvmlEventSetFree, events)
            self._calls.ask("nvmlDeviceRegisterEvents", _XID_EVENT, events)
            on_error.pop_all()  # registered: the set stays open
        return events

    def _drain(self) -> None:
        lib = self._calls.lib
        for _ in range(_MOST_AT_ONCE):
            try:
                event = lib.nvmlEventSetWait(self._events, 0)
            except lib.NVMLError as error:
                if error.value == TIMEOUT:
                    return
                raise
            if event.eventType & _XID_EVENT:
                self._counts.codes[int(event.eventData)] += 1

    def close(self) -> None:
        """Count the last faults, then free the set."""
        if self._events is None:
            return
        lib = self._calls.lib
        with contextlib.suppress(lib.NVMLError):
            self._drain()
        with contextlib.suppress(lib.NVMLError):
            lib.nvmlEventSetFree(self._events)
