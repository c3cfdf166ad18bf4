"""Takes from the ledger what a history keeps of GPUs, host and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from otel_ddp import catalog
from otel_ddp.agent.ledger import Ledger
from otel_ddp.catalog import Kind
from otel_ddp.history.tables import SeriesKey
from otel_ddp.words import RANK_LABELS

# What a person looks at; the others are on /metrics and in Prometheus.
_METRICS = (
    catalog.HW_GPU_UTILIZATION,
    catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION,
    catalog.HW_GPU_MEMORY_USAGE,
    catalog.HW_GPU_MEMORY_LIMIT,
    catalog.HW_POWER,
    catalog.HW_TEMPERATURE,
    catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY,
    catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE,
    catalog.TRAINING_CUDA_MEMORY_ALLOCATED,
    catalog.PROCESS_MEMORY_USAGE,
    catalog.PROCESS_CPU_TIME,
    catalog.SYSTEM_CPU_UTILIZATION,
    catalog.SYSTEM_MEMORY_USAGE,
    catalog.SYSTEM_MEMORY_LIMIT,
    catalog.SYSTEM_DISK_IO,
    catalog.SYSTEM_NETWORK_IO,
)

RunKey = tuple[str, str]
"""Group and run."""


class Sample(NamedTuple):
    """One reading. Without a run it is the node's, and belongs to every run there."""

    run: RunKey | None
    key: SeriesKey
    time_ns: int
    value: float


def samples(ledger: Ledger) -> Iterator[Sample]:
    """The readings as they are now. The caller holds the ledger's lock."""
    for metric, of_metric in ledger.of(_METRICS):
        kind = "counter" if metric.kind is Kind.COUNTER else "node"
        for series in of_metric:
            value = series.value
            if not isinstance(value, (int, float)):
                continue
            labels = dict(series.labels)
            run = (labels["group"], labels["run"]) if labels.get("run") else None
            more = tuple(pair for pair in series.labels if pair[0] not in RANK_LABELS)
            key = SeriesKey(kind, metric.name, labels.get("rank", ""), more)
            yield Sample(run, key, series.time_ns, float(value))
