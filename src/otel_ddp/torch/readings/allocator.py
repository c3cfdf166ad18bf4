"""What torch's allocator holds on a device: one question to it, none to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from otel_ddp import containment
from otel_ddp.recording.device_scalars import module_of


class Reading(NamedTuple):
    """Bytes and counts; None for what this allocator does not know."""

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
        """What it holds now; None before the device is in use, or where it cannot be asked."""
        ask = getattr(self._module, "memory_stats_as_nested_dict", None)
        # A question must not be what makes a context on the device.
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
        # CUDA's own allocator (cudaMallocAsync) has these two keys as well, and never counts.
        backend = getattr(self._module, "get_allocator_backend", None)
        return backend is None or backend() == "native"


def _number(found: Any, *keys: str) -> int | None:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None
