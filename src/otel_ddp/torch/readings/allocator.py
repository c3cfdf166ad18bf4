"""Reads how much memory torch's allocator holds on a device, without asking the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from otel_ddp import catalog
from otel_ddp.errors import containment
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import Progress

_READ_EVERY_S = 5.0


class Reading(NamedTuple):
    """Bytes and counts; None for what this allocator does not count."""

    allocated: int | None
    reserved: int | None
    peak: int | None
    retries: int | None
    ooms: int | None


class Allocator:
    """The allocator of one device."""

    def __init__(
        self, device: torch.device, *, module: Callable[[torch.device], Any] = module_of
    ) -> None:
        self._device = device
        self._module = module(device)

    def read(self) -> Reading | None:
        """What it holds now; None before the device is in use, or without such statistics."""
        ask = getattr(self._module, "memory_stats_as_nested_dict", None)
        # Reading must not create a context on the device.
        if ask is None or not self._module.is_initialized():
            return None
        try:
            found = ask(self._device)
            counts = self._counts()
        except RuntimeError:
            containment.reraise_foreign()
            # An allocator of the user's own that keeps no statistics, or a failed device.
            return None
        if not found:
            return None
        return Reading(
            allocated=_number(found, "allocated_bytes", "all", "current"),
            reserved=_number(found, "reserved_bytes", "all", "current"),
            peak=_number(found, "allocated_bytes", "all", "peak"),
            retries=_number(found, "num_alloc_retries") if counts else None,
            ooms=_number(found, "num_ooms") if counts else None,
        )

    def _counts(self) -> bool:
        # CUDA's own allocator (cudaMallocAsync) has these two keys as well, but never counts.
        backend = getattr(self._module, "get_allocator_backend", None)
        return backend is None or backend() == "native"


class MemoryReadings:
    """Records what the allocator of one device holds, every few seconds."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._allocator = Allocator(device)
        self._progress = progress
        self._next_s = 0.0
        self._retries: int | None = None

    def poll(self) -> None:
        """Read and record, if it is time."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _READ_EVERY_S
        reading = self._allocator.read()
        if reading is None:
            return
        totals = self._progress.recorder.totals
        for metric, value in (
            (catalog.TRAINING_CUDA_MEMORY_ALLOCATED, reading.allocated),
            (catalog.TRAINING_CUDA_MEMORY_RESERVED, reading.reserved),
            (catalog.TRAINING_CUDA_MEMORY_PEAK, reading.peak),
            (catalog.TRAINING_CUDA_ALLOC_RETRIES, reading.retries),
            (catalog.TRAINING_OOMS, reading.ooms),
        ):
            if value is not None:
                totals.stamp(metric, float(value))
        if reading.retries is not None:
            if self._retries is not None and reading.retries > self._retries:
                self._progress.work.retries += reading.retries - self._retries
            self._retries = reading.retries


def _number(found: Any, *keys: str) -> int | None:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None
