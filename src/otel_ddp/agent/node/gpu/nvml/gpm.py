"""Reads how busy a GPU's engines were between two samples, if NVML measures it (GPM)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from otel_ddp.agent.node.gpu.nvml.calls import SUCCESS, Calls
from otel_ddp.agent.node.gpu.nvml.measurements import Measurements
from otel_ddp.agent.node.measurement import Measurement
from otel_ddp.catalog import HW_GPU_IO, OTEL_DDP_GPU_ENGINE_ACTIVE

_VERSION = 1
_ENGINES = {"sm": 2, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12, "fp16": 13}
_PCIE = {"transmit": 20, "receive": 21}
_MOST_PCIE_MIB_PER_S = 1 << 20


class Gpm:
    """Each read covers the time since the one before; the first one returns nothing."""

    def __init__(
        self,
        calls: Calls,
        measurements: Measurements,
        *,
        pci: str,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        instance: int | None = None,
    ) -> None:
        """*instance*: of a MIG instance, whose calls go to its board."""
        self._calls = calls
        self._gauge = measurements.gauge
        self._pci = pci
        self._clock = clock
        self._wall_ns = wall_ns
        self._instance = instance
        # Only a whole board has a PCIe connection of its own.
        self._metrics = {**_ENGINES, **(_PCIE if instance is None else {})}
        self._before: Any = None
        self._before_s = 0.0
        self._spare: Any = None
        self._moved_bytes = dict.fromkeys(_PCIE, 0.0)
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
        found = {} if self._before is None else self._between(self._before, self._spare)
        elapsed_s = now_s - self._before_s
        self._before, self._spare, self._before_s = self._spare, self._before, now_s
        return self._measurements(found, elapsed_s)

    def _between(self, before: Any, after: Any) -> dict[str, float]:
        lib = self._calls.lib
        asked = lib.c_nvmlGpmMetricsGet_t()
        asked.version = _VERSION
        asked.numMetrics = len(self._metrics)
        asked.sample1, asked.sample2 = before, after
        for slot, number in enumerate(self._metrics.values()):
            asked.metrics[slot].metricId = number
        self._calls.guarded(lambda: lib.nvmlGpmMetricsGet(asked))
        return {
            name: asked.metrics[slot].value
            for slot, name in enumerate(self._metrics)
            if asked.metrics[slot].nvmlReturn == SUCCESS
        }

    def _measurements(self, found: dict[str, float], elapsed_s: float) -> Iterable[Measurement]:
        if not self._since_ns:
            self._since_ns = self._wall_ns()
        for engine in (each for each in _ENGINES if each in found):
            percent = found[engine]
            if 100 < percent < 101:  # by rounding
                percent = 100.0
            yield from self._gauge(
                OTEL_DDP_GPU_ENGINE_ACTIVE, percent / 100, (("engine", engine),), at_most=1
            )
        for direction in (each for each in _PCIE if each in found):
            mib_per_s = found[direction]
            if not self._gauge(HW_GPU_IO, mib_per_s, at_most=_MOST_PCIE_MIB_PER_S):
                continue
            self._moved_bytes[direction] += mib_per_s * (1 << 20) * elapsed_s
            yield from self._gauge(
                HW_GPU_IO,
                self._moved_bytes[direction],
                (("pci", self._pci), ("network.io.direction", direction)),
                at_most=2**63,
                start_ns=self._since_ns,
            )

    def close(self) -> None:
        """Free the samples. Call it only while NVML is open."""
        lib = self._calls.lib
        for sample in (self._before, self._spare):
            if sample is not None:
                with contextlib.suppress(lib.NVMLError):
                    lib.nvmlGpmSampleFree(sample)
