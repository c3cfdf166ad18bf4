"""Copies scalar tensors from a device asynchronously, and records each when its copy arrives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from otel_ddp import errors
from otel_ddp.recording import values
from otel_ddp.recording.steps import When

_SLOTS = 256
_DRAIN_S = 0.2


class _Copy(NamedTuple):
    arrived: Any  # the device event recorded after the copy
    device: torch.device
    slot: int
    number: int
    when: When


def module_of(device: torch.device) -> Any:
    """The torch module of a device, such as torch.cuda; None if there is none, or if it has no
    events.

    `torch.get_device_module` would do the same, but older versions of torch lack it.
    """
    found = getattr(torch, device.type, None)
    return found if hasattr(found, "Event") else None


class DeviceScalars:
    """Copies scalars from devices asynchronously, and polls for completed copies."""

    def __init__(
        self,
        record: Callable[[int, float, When], None],
        *,
        module: Callable[[torch.device], Any] = module_of,
        slab: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        # How many copies were given up, because their device failed or did not finish in time.
        self.lost = 0
        self._record = record
        self._module = module
        self._make_slab = slab or _page_locked
        self._lock = threading.RLock()
        self._busy = False
        self._copies: deque[_Copy] = deque()
        self._free = list(range(_SLOTS))
        self._events: dict[torch.device, list[Any]] = {}
        self._slab: torch.Tensor | None = None
        self._has_tried = False

    def start_copy(self, number: int, tensor: torch.Tensor, when: When) -> str:
        """Start copying a scalar; returns the reason if that is impossible, else an empty text."""
        if why := values.no_scalar(tensor):
            return why
        if tensor.is_complex():
            return values.COMPLEX
        if hasattr(tensor, "placements"):
            # A replicated DTensor has the whole value on each rank, so this runs no collective.
            # `no_scalar` has refused all others.
            tensor = tensor.to_local()
        module = self._module(tensor.device)
        if module is None:
            return f"a tensor on {tensor.device} cannot be copied without waiting for it"
        if captures(module):
            return "a graph is being captured; log outside of it"
        # The lock keeps out other threads that log. But a signal handler that interrupts this
        # thread gets through, as the lock is reentrant: `_busy` keeps it out.
        with self._lock:
            if self._busy:
                return "a signal handler logged it during another log call"
            self._busy = True
            try:
                self._poll()
                return self._send(module, number, tensor, when)
            except RuntimeError as error:
                errors.reraise_foreign()
                return f"its device failed: {str(error)[:200]}"
            finally:
                self._busy = False

    def _send(self, module: Any, number: int, tensor: torch.Tensor, when: When) -> str:
        if not self._free:
            return f"{_SLOTS} tensors are still on their way from the device"
        # Leave inference mode: a slab created in it could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self._slab is None:
                # Try to allocate only once. Each try calls the driver, and may make the host wait
                # for the device.
                if self._has_tried:
                    return "page-locked memory is lacking; log its .item()"
                self._has_tried = True
                self._slab = self._make_slab()
            slot = self._free.pop()
            try:
                value = tensor.detach().reshape(()).to(torch.float64)
                self._slab[slot].copy_(value, non_blocking=True)
                known = self._events.get(tensor.device)
                arrived = known.pop() if known else module.Event()
                # Record the event on the stream of the tensor's device, which runs the copy and may
                # not be the current device.
                arrived.record(module.current_stream(tensor.device))
            except BaseException:
                self._free.append(slot)
                raise
        self._copies.append(_Copy(arrived, tensor.device, slot, number, when))
        return ""

    def poll(self) -> None:
        """Record the scalars that have arrived, in the order of logging."""
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                self._poll()
            finally:
                self._busy = False

    def _poll(self) -> None:
        while self._copies:
            copy = self._copies[0]
            try:
                # If a graph is being captured, do not query the event: that would invalidate the
                # graph.
                if captures(self._module(copy.device)) or not copy.arrived.query():
                    return
            except RuntimeError:
                errors.reraise_foreign()
                # A failed device stays failed: its copies never arrive.
                self.lost += len(self._copies)
                self._copies.clear()
                return
            self._copies.popleft()
            assert self._slab is not None
            value = float(self._slab[copy.slot])
            self._free.append(copy.slot)
            self._events.setdefault(copy.device, []).append(copy.arrived)
            self._record(copy.number, value, copy.when)

    def drain(self) -> None:
        """At the end of a run: wait a moment for the last copies, but not for a hung device."""
        deadline = time.monotonic() + _DRAIN_S
        self.poll()
        while self._copies and time.monotonic() < deadline:
            time.sleep(0.002)
            self.poll()
        self.lost += len(self._copies)
        self._copies.clear()


def _page_locked() -> torch.Tensor:
    # Only copies to page-locked memory are asynchronous. Name the device: the user may have changed
    # torch's default device.
    return torch.empty(_SLOTS, dtype=torch.float64, device="cpu", pin_memory=True)


def captures(module: Any) -> bool:
    """Whether a graph is being captured on this kind of device, so that queries are forbidden."""
    asks = getattr(module, "is_current_stream_capturing", None)
    # Ask only if the device is initialized: `is_current_stream_capturing` raises if there is no
    # driver, as on a machine where the device's tensors are fake tensors.
    begun = getattr(module, "is_initialized", None)
    return asks is not None and (begun is None or begun()) and bool(asks())
