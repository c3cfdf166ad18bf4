"""NVIDIA's driver: lists the devices, the questions to each, and its users, by NVML."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_ddp import errors
from otel_ddp.agent.node.gpu.nvml_questions import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    Calls,
    DeviceLost,
    GpmSamples,
    NotSupported,
    Question,
    Xids,
    printable,
    questions,
    words,
)
from otel_ddp.agent.node.source import Measurement, boot_ns

_MOST_USED_BYTES = 1 << 50
# A reset board appears only once the driver is opened anew, which interrupts the others.
_SEARCHED_AGAIN_S = 600.0
_PROCESSES = (
    # If several lists have a process, each has all of its memory.
    *("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
_IN_CONTAINERS = (
    "a container has to be started with the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES that "
    "include `utility`"
)
_HINTS = {
    LIBRARY_NOT_FOUND: "There is no NVIDIA driver library (libnvidia-ml.so.1) here: "
    f"install the driver if the machine has NVIDIA GPUs; {_IN_CONTAINERS}.",
    DRIVER_NOT_LOADED: "The NVIDIA kernel driver is not loaded: load it with "
    "`modprobe nvidia`, or reboot the machine; `nvidia-smi` says whether it works.",
    LIB_RM_VERSION_MISMATCH: "NVIDIA's library and its loaded kernel driver are of "
    "different versions, as after an upgrade: reboot the machine or reload the kernel modules, "
    "then start the agent anew.",
    NO_PERMISSION: "The NVIDIA driver may not be asked: this user needs access to "
    f"/dev/nvidiactl and /dev/nvidia0 and so on, and {_IN_CONTAINERS}.",
    FUNCTION_NOT_FOUND: "The NVIDIA driver is too old for GPU statistics: install a newer one.",
}
_NO_DEVICES = (
    "The NVIDIA driver shows no GPU: see whether `nvidia-smi` does, and whether "
    "NVIDIA_VISIBLE_DEVICES or the scheduler hides them."
)


class DriverMissing(Exception):
    """There is no driver, or no device. The text is one sentence that a user can act on."""


@dataclass(frozen=True)
class Device:
    """A board, or a part of one with numbers of its own (a MIG instance)."""

    uuid: str
    index: str
    """As `nvidia-smi` counts: `3`, and `3:1` for the second part of that board."""
    name: str
    pci: str = ""
    parent: str = ""
    """The UUID of the board that this device is a part of."""


class User(NamedTuple):
    """A process that uses memory on a device."""

    pid: int
    used_bytes: int | None


class Nvml:
    """Only one thread calls it; every call may hang. *lib*: has the interface of pynvml."""

    def __init__(
        self,
        lib: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._lib = lib
        self._clock = clock
        self._wall_ns = wall_ns
        # The driver counts since it was loaded: at boot or, seldom, later.
        self._loaded_ns = boot_ns()
        self._opened = False
        self._parts: dict[str, Calls] = {}
        self.silent: list[str] = []
        """One sentence for each board that did not answer when they were last listed."""
        self._held: dict[str, list[Xids | GpmSamples]] = {}
        # Both are kept when the driver is closed: the board of each index, and its Xid faults.
        self._boards_before: dict[int, Device] = {}
        self._xids: dict[str, Xids] = {}

    def open(self) -> str:
        """The driver's version; raises DriverMissing. Called again after DeviceLost."""
        if self._lib is None:
            try:
                # Imported only here, so that a node without a GPU does not pay for it.
                import pynvml
            except ImportError as error:
                raise DriverMissing(
                    "GPU statistics need nvidia-ml-py: pip install nvidia-ml-py."
                ) from error
            self._lib = pynvml
        try:
            self._lib.nvmlInit()
            self._opened = True
            count = self._lib.nvmlDeviceGetCount()
            version = words(self._lib.nvmlSystemGetDriverVersion)
        except self._lib.NVMLError as error:
            self.close()
            raise DriverMissing(self._hint(error)) from error
        if not count:
            self.close()
            raise DriverMissing(_NO_DEVICES)
        return f"NVIDIA driver {version}"

    def _hint(self, error: Any) -> str:
        sentence = f"The NVIDIA driver does not answer ({printable(str(error))}): see `nvidia-smi`."
        return _HINTS.get(error.value, sentence)

    def close(self) -> None:
        """Release everything; never raises."""
        for uuid in tuple(self._held):
            self._release(uuid)
        self._parts = {}
        if self._opened:
            self._opened = False
            with contextlib.suppress(self._lib.NVMLError):
                self._lib.nvmlShutdown()

    def _release(self, uuid: str) -> None:
        for each in self._held.pop(uuid, ()):
            each.close()

    def devices(self) -> Sequence[Device]:
        """All devices, in the order of their indices."""
        try:
            count = self._lib.nvmlDeviceGetCount()
        except self._lib.NVMLError as error:
            raise DeviceLost("the driver no longer counts its devices") from error
        parts: dict[str, Calls] = {}
        found: list[Device] = []
        self.silent = []
        for index in range(count):
            try:
                calls = Calls(self._lib, self._lib.nvmlDeviceGetHandleByIndex(index))
                board = self._board(calls, index)
            except (NotSupported, DeviceLost, self._lib.NVMLError) as error:
                # One board that fails must not hide the others.
                found += self._failed(index, error)
                continue
            found.append(board)
            parts[board.uuid] = calls
            for device, part in self._instances(board, calls):
                found.append(device)
                parts[device.uuid] = part
        for uuid in self._held.keys() - parts.keys():
            self._release(uuid)
        self._parts = parts
        return tuple(found)

    def _board(self, calls: Calls, index: int) -> Device:
        uuid = calls.words("nvmlDeviceGetUUID")
        name = calls.words("nvmlDeviceGetName") or "NVIDIA GPU"
        try:
            pci = printable(calls.ask("nvmlDeviceGetPciInfo").busId)
        except (NotSupported, UnicodeDecodeError):
            pci = ""
        board = Device(uuid, str(index), name, pci)
        self._boards_before[index] = board
        return board

    def _failed(self, index: int, error: Exception) -> Iterator[Device]:
        """A board that no longer answers stays listed if it has reported faults."""
        sentence = (
            f"GPU {index} does not answer ({printable(str(error))}): see `nvidia-smi`, and the "
            "kernel's log for Xid."
        )
        self.silent.append(sentence)
        errors.warn_once(f"gpu {sentence}", "GPU: %s", sentence)
        before = self._boards_before.get(index)
        if before is not None and self._xids_of(before).codes:
            yield before

    def _instances(self, board: Device, calls: Calls) -> Iterator[tuple[Device, Calls]]:
        try:
            current, _pending = calls.ask("nvmlDeviceGetMigMode")
            most = calls.ask("nvmlDeviceGetMaxMigDeviceCount") if current else 0
        except NotSupported:
            return
        for index in range(most):
            try:
                handle = calls.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            except (NotSupported, self._lib.NVMLError):
                continue  # no instance has this number
            part = Calls(self._lib, handle, calls)
            uuid = part.words("nvmlDeviceGetUUID")
            part.instance = part.ask("nvmlDeviceGetGpuInstanceId")
            name = part.words("nvmlDeviceGetName") or f"{board.name} MIG"
            device = Device(uuid, f"{board.index}:{index}", name, board.pci, board.uuid)
            yield device, part

    def questions(self, device: Device) -> Sequence[Question]:
        """Those that this device can answer."""
        calls, xids = self._parts.get(device.uuid), self._xids_of(device)
        if calls is None:
            return (self._question_to_failed(xids),)
        self._release(device.uuid)
        held = self._held[device.uuid] = []
        asked = []
        if calls.instance is None:
            # First of all: a fault may be the reason why the other questions fail.
            xids.calls = calls
            held.append(xids)
            asked.append(Question("Xid", xids.ask))
        gpm = None
        with contextlib.suppress(NotSupported):
            if calls.board.ask("nvmlGpmQueryDeviceSupport").isSupportedDevice:
                gpm = GpmSamples(calls, self._clock, self._wall_ns)
                held.append(gpm)
        return [*asked, *questions(calls, device.pci, self._loaded_ns, gpm)]

    def _question_to_failed(self, xids: Xids) -> Question:
        failed_s = self._clock()

        def ask() -> Sequence[Measurement]:
            if self._clock() - failed_s > _SEARCHED_AGAIN_S:
                raise DeviceLost("it had failed, and is searched again")
            return xids.ask()

        return Question("Xid", ask)

    def _xids_of(self, device: Device) -> Xids:
        return self._xids.setdefault(device.uuid, Xids(device.pci, self._wall_ns()))

    def users(self, device: Device) -> Sequence[User]:
        """The processes that compute on this device."""
        calls = self._parts.get(device.uuid)
        users: dict[int, User] = {}
        if calls is None:
            return ()
        for function in _PROCESSES:
            with contextlib.suppress(NotSupported):
                for process in calls.ask(function):
                    used = process.usedGpuMemory
                    known = used is not None and 0 <= used < _MOST_USED_BYTES
                    user = User(int(process.pid), int(used) if known else None)
                    if user.pid not in users or users[user.pid].used_bytes is None:
                        users[user.pid] = user
        return tuple(users.values())
