"""Reads how busy a GPU's engines were between two samples, if NVML measures it (GPM)."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from otel_ddp.agent.node.gpu.nvml.calls import SUCCESS, Calls
from otel_ddp.agent.node.gpu.nvml.table import Series
from otel_ddp.agent.node.measurement import Measurement
from otel_ddp.catalog import Kind

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
