"""Scalars on a device, on their way: copied asynchronously, recorded once they have arrived."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from otel_ddp import containment

_SLOTS = 256
_LAST_CALL_S = 0.2


class _Copy(NamedTuple):
    arrived: Any  # an event of the device's stream
    device: torch.device
    slot: int
    number: int
    step: int | None
    epoch: float | None
    logged_ns: int


def module_of(device: torch.device) -> Any:
    """torch.cuda and its like, None where a device has none; also before get_device_module."""
    found = getattr(torch, device.type, None)
    return found if hasattr(found, "Event") else None


class DeviceScalars:
    """Never asks the device to finish anything: it only looks whether it has."""

    def __init__(
        self,
        landed: Callable[[int, float, int | None, float | None, int], None],
        *,
        module: Callable[[torch.device], Any] = module_of,
        slab: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.lost = 0
        """How many will never arrive."""
        self._landed = landed
        self._module = module
        self._make_slab = slab or _page_locked
        self._lock = threading.RLock()
        self._busy = False
        self._flights: deque[_Copy] = deque()
        self._free = list(range(_SLOTS))
        self._events: dict[torch.device, list[Any]] = {}
        self._slab: torch.Tensor | None = None

    def take(
        self,
        number: int,
        tensor: torch.Tensor,
        step: int | None,
        epoch: float | None,
        now: int,
    ) -> str:
        """Send a scalar off; what it says is why it could not be."""
        if tensor.numel() != 1:
            return f"one number was expected, got {tensor.numel()} (shape {tuple(tensor.shape)})"
        if tensor.is_complex():
            return "a complex number has no place on a curve; log its parts"
        if (placements := getattr(tensor, "placements", None)) is not None:
            # A DTensor. What is not whole on every rank would take a collective to make so.
            if not all(each.is_replicate() for each in placements):
                return "its parts are spread over ranks; log what full_tensor() gives"
            tensor = tensor.to_local()
        module = self._module(tensor.device)
        if module is None:
            return f"a tensor on {tensor.device} cannot be copied without waiting for it"
        if _capturing(module):
            return "a graph is being captured; log outside of it"
        # Another thread may log as well; a signal handler in the middle of this may not.
        with self._lock:
            if self._busy:
                return "a signal handler logged it in the middle of another"
            self._busy = True
            try:
                self._land()
                return self._send(module, number, tensor, step, epoch, now)
            except RuntimeError as error:
                containment.reraise_foreign()
                return f"its device failed: {str(error)[:200]}"
            finally:
                self._busy = False

    def _send(
        self,
        module: Any,
        number: int,
        tensor: torch.Tensor,
        step: int | None,
        epoch: float | None,
        now: int,
    ) -> str:
        if not self._free:
            return f"{_SLOTS} tensors are still on their way from the device"
        # What is made under inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self._slab is None:
                self._slab = self._make_slab()
            slot = self._free.pop()
            try:
                value = tensor.detach().reshape(()).to(torch.float64)
                self._slab[slot].copy_(value, non_blocking=True)
                arrived = self._record(module, tensor.device)
            except BaseException:
                self._free.append(slot)
                raise
        self._flights.append(_Copy(arrived, tensor.device, slot, number, step, epoch, now))
        return ""

    def _record(self, module: Any, device: torch.device) -> Any:
        known = self._events.get(device)
        arrived = known.pop() if known else module.Event()
        # The copy runs on the tensor's device, which need not be the current one.
        if hasattr(module, "current_stream"):
            arrived.record(module.current_stream(device))
        else:
            arrived.record()
        return arrived

    def land(self) -> None:
        """Record what has arrived, in the order in which it was logged."""
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                self._land()
            finally:
                self._busy = False

    def _land(self) -> None:
        while self._flights:
            flight = self._flights[0]
            try:
                # Asking for an event would spoil a graph that is being captured.
                if _capturing(self._module(flight.device)) or not flight.arrived.query():
                    return
            except RuntimeError:
                containment.reraise_foreign()
                # A device that has failed stays so: nothing more will come from it.
                self.lost += len(self._flights)
                self._flights.clear()
                return
            self._flights.popleft()
            assert self._slab is not None
            value = float(self._slab[flight.slot])
            self._free.append(flight.slot)
            self._events.setdefault(flight.device, []).append(flight.arrived)
            self._landed(flight.number, value, flight.step, flight.epoch, flight.logged_ns)

    def last_call(self) -> None:
        """At the end of a run: wait a moment for the stragglers, never for a hung device."""
        deadline = time.monotonic() + _LAST_CALL_S
        self.land()
        while self._flights and time.monotonic() < deadline:
            time.sleep(0.002)
            self.land()
        self.lost += len(self._flights)
        self._flights.clear()


def _page_locked() -> torch.Tensor:
    # Once a process: page-locked memory is what makes the copy asynchronous. The device is named
    # because the user may have set another default.
    return torch.empty(_SLOTS, dtype=torch.float64, device="cpu", pin_memory=True)


def _capturing(module: Any) -> bool:
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(asks())
