"""Reads which GPUs a process uses, and its memory statistics there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import Progress
from otel_ddp.vocabulary import catalog

_MOST_GPUS = 64


def _properties(device: torch.device) -> Any:
    return module_of(device).get_device_properties(device)


def gpu_facts(
    devices: Iterable[torch.device], properties: Callable[[torch.device], Any] = _properties
) -> dict[str, Any]:
    """The facts by which the agent identifies this process's GPUs; none without a CUDA device.

    Call it once the model is on its devices, as reading properties would initialize CUDA.
    """
    found = sorted({each for each in devices if each.type == "cuda"}, key=str)[:_MOST_GPUS]
    if not found:
        return {}

    def uuid(device: torch.device) -> str:
        # torch 2.4 has no `uuid`: without it the agent uses the driver's list.
        return errors.attempt(lambda: str(properties(device).uuid), "")

    return {"boards": [{"index": each.index or 0, "uuid": uuid(each)} for each in found]}


# -- memory

_READ_EVERY_S = 5.0


# Metric -> key in the allocator's statistics.
_STATISTICS = {
    catalog.TRAINING_DEVICE_MEMORY_ALLOCATED: "allocated_bytes.all.current",
    catalog.TRAINING_DEVICE_MEMORY_RESERVED: "reserved_bytes.all.current",
    catalog.TRAINING_DEVICE_MEMORY_PEAK: "allocated_bytes.all.peak",
    catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES: "num_alloc_retries",
    catalog.TRAINING_OOMS: "num_ooms",
}
# Left out with the cudaMallocAsync backend, whose values for these keys stay 0.
_COUNTS = (catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES, catalog.TRAINING_OOMS)


def memory(
    device: torch.device, *, module: Callable[[torch.device], Any] = module_of
) -> dict[catalog.Metric, int]:
    """The allocator's statistics; empty if there are none or the device is not initialized."""
    torchs = module(device)
    ask = getattr(torchs, "memory_stats", None)
    is_initialized = getattr(torchs, "is_initialized", None)
    # Reading must not create a context on the device.
    if ask is None or is_initialized is None or not is_initialized():
        return {}
    backend_of = getattr(torchs, "get_allocator_backend", lambda: "native")
    # Reading raises if the user's allocator has no statistics, or if the device has failed.
    nothing: tuple[dict[str, Any], str] = {}, ""
    statistics, backend = errors.attempt(lambda: (dict(ask(device)), backend_of()), nothing)
    found = {
        metric: number
        for metric, key in _STATISTICS.items()
        if isinstance(number := statistics.get(key), int)
        and (backend == "native" or metric not in _COUNTS)
    }
    if found and (limit := errors.attempt(lambda: _limit(torchs, device), 0)):
        found[catalog.TRAINING_DEVICE_MEMORY_LIMIT] = limit
    return found


def _limit(torchs: Any, device: torch.device) -> int:
    """The process's memory limit: its share of the device's memory, or all if no share is known."""
    share_of = getattr(torchs, "get_per_process_memory_fraction", lambda device: 1.0)
    return int(torchs.get_device_properties(device).total_memory * share_of(device))


class MemoryReadings:
    """Records the memory statistics of one device, every few seconds."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device = device
        self._progress = progress
        self._next_s = 0.0
        self._known: set[catalog.Metric] = set()
        self._retries: int | None = None

    def poll(self) -> None:
        """Read and record the statistics, if the last reading is old enough."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _READ_EVERY_S
        found = memory(self._device)
        self._known |= found.keys()
        for metric, number in found.items():
            self._progress.recorder.totals.stamp(metric, float(number))
        retries = found.get(catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES)
        if retries is not None:
            if self._retries is not None and retries > self._retries:
                self._progress.work.retries += retries - self._retries
            self._retries = retries

    def capability(self) -> dict[str, str]:
        """Whether memory statistics are read, or why not; empty before the first poll."""
        if not self._next_s:
            return {}
        if not self._known:
            return dict.fromkeys(("memory", "out_of_memory"), "no_statistics")
        return {
            "memory": "",
            "out_of_memory": "" if self._known.issuperset(_COUNTS) else "no_counts",
        }
