"""Reads NVIDIA GPUs through NVML: measurements and processes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from otel_ddp import errors
from otel_ddp.agent.node.nvml_calls import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    Calls,
    DeviceLost,
    GpmSamples,
    NotSupported,
    Xids,
)
from otel_ddp.agent.node.nvml_table import ROWS, Field, Fields, Gpm, Way
from otel_ddp.agent.node.source import Measurement, boot_ns
from otel_ddp.vocabulary.catalog import Kind

T = TypeVar("T")
Attributes = tuple[tuple[str, str], ...]

# How often to list the devices anew: the driver may be loaded or reloaded while the agent runs, and
# a GPU may be added or reset.
_FIND_EVERY_S = 60.0
_MOST_USED_BYTES = 1 << 50
_LINK_COUNT, _MOST_LINKS = Field(91), 72
# A process may be in several of these lists. Each list shows all of its memory, so don't add up.
_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
_IN_CONTAINERS = (
    "a container has to be started with the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES that "
    "include `utility`"
)
_NO_DEVICES = (
    "The NVIDIA driver shows no GPU: see whether `nvidia-smi` does, and whether "
    "NVIDIA_VISIBLE_DEVICES or the scheduler hides them."
)


class _DriverMissing(Exception):
    """There is no driver, or it does not answer. The text is a sentence for users."""


@dataclass(frozen=True)
class Device:
    """A GPU."""

    uuid: str
    index: str
    """The number of the GPU in `nvidia-smi`."""
    name: str
    pci: str = ""


class User(NamedTuple):
    """A process with memory on a device."""

    pid: int
    used_bytes: int | None


class DeviceSample(NamedTuple):
    """One device with its measurements and processes."""

    device: Device
    measurements: tuple[Measurement, ...]
    users: tuple[User, ...]


class GpuSample(NamedTuple):
    """All devices at one time."""

    devices: tuple[DeviceSample, ...]
    remark: str
    """Why devices are missing; else empty."""
    version: str


def identity(device: Device) -> Attributes:
    """The attributes that identify a GPU. They come first in all GPU metrics."""
    return (
        ("hw.id", device.uuid),
        ("hw.type", "gpu"),
        ("hw.model", device.name),
        ("gpu", device.index),
    )


class _Watched:
    """A device that is read periodically."""

    def __init__(self, device: Device, calls: Calls, xids: Xids) -> None:
        self.device = device
        self.lost = ""
        """Why the device is no longer read; else empty."""
        self._calls, self._xids = calls, xids
        ways = [way for row in ROWS for ways in row.series.values() for way in ways]
        self._engines = [way for way in ways if isinstance(way, Gpm)]
        self._gpm: GpmSamples | None = None
        # NVML's answers in the current reading; the key is the call. None: the call is unsupported,
        # or has failed.
        self._answers: dict[tuple[Any, ...], Any] = {}
        self._rates: Mapping[Gpm, float] = {}

    def close(self) -> None:
        """Release NVML's handles. Call it only while NVML is open."""
        self._xids.close()
        if self._gpm is not None:
            self._gpm.close()

    def read(self, loaded_ns: int, gpm: Callable[[Calls], GpmSamples]) -> DeviceSample:
        """Read the device. *loaded_ns*: when the driver's counters began, approximately."""
        found: tuple[Measurement, ...] = ()
        users: tuple[User, ...] = ()
        try:
            if not self.lost:
                # Read faults first: a fault may be the reason why the other calls fail.
                self._attempt("Xid", lambda: self._xids.poll(self._calls))
                self._answers.clear()
                self._read_engines(gpm)
                found = tuple(
                    each._replace(attributes=identity(self.device) + each.attributes)
                    for each in self._measured(loaded_ns)
                    if not math.isnan(each.value)
                )
                if not found:
                    raise DeviceLost("the driver answers no question about it")
                users = self._users()
        except DeviceLost as why:
            # The caller goes on with the other devices: only this one is lost.
            self.lost = str(why)
        return DeviceSample(self.device, found, users)

    def _attempt(self, what: str, ask: Callable[[], T]) -> T | None:
        """The answer to the call *ask*; None if the GPU does not support the call, or if the call
        failed, which is logged."""
        try:
            return ask()
        except NotSupported:
            return None
        except DeviceLost:
            raise
        except errors.ANY_ERROR as why:
            text = "GPU: %s failed (%s: %s); it is tried again."
            errors.warn_once(f"gpu {what}", text, what, type(why).__name__, why)
        return None

    # -- rows of the table

    def _read_engines(self, gpm: Callable[[Calls], GpmSamples]) -> None:
        """Read the activity of all engines between the last sample and a new one."""
        self._gpm = self._gpm or self._attempt("engines", lambda: gpm(self._calls))
        self._rates = {}
        if (samples := self._gpm) is not None:
            self._rates = self._attempt("engines", lambda: samples.read(self._engines)) or {}

    def _measured(self, loaded_ns: int) -> Iterator[Measurement]:
        """The measurement of each series, read in the first way that the device supports."""
        for row in ROWS:
            for word, ways in row.series.items():
                for way in ways:
                    try:
                        raw = self._raw(way)
                    except NotSupported:
                        continue
                    if raw is not None:
                        start_ns = loaded_ns if row.metric.kind is Kind.COUNTER else 0
                        if start_ns and isinstance(way, Gpm) and self._gpm is not None:
                            start_ns = self._gpm.since_ns
                        yield row.measurement(word, raw, self.device.pci, start_ns)
                    break

    def _raw(self, way: Way) -> float | None:
        """The value in NVML's unit; None if it could not be read this time."""
        if isinstance(way, Gpm):
            if self._gpm is None:
                raise NotSupported
            return self._rates.get(way)
        if isinstance(way, Fields):
            found = self._attempt("fields", lambda: self._calls.fields(self._fields_of(way)))
            if found is None:
                return None
            if not found:
                raise NotSupported
            # If a part could not be read, there is no sum: a lower one would look like a counter
            # reset.
            known = [part for part in found.values() if part is not None]
            return sum(known) * way.times if len(known) == len(found) else None
        # Call each function once per reading, as several series may use its answer.
        if way.function not in self._answers:
            ask = partial(self._calls.ask, *way.function)
            self._answers[way.function] = self._attempt(way.function[0], ask)
        if (answer := self._answers[way.function]) is None:
            raise NotSupported
        return way.value(answer)

    def _fields_of(self, way: Fields) -> Sequence[Field]:
        if not way.links:
            return way.fields
        count = self._calls.fields([_LINK_COUNT]).get(_LINK_COUNT) or 0
        links = range(int(count) if count <= _MOST_LINKS else 0)
        return [each._replace(scope=link) for each in way.fields for link in links]

    def _users(self) -> tuple[User, ...]:
        """The processes on this device."""
        users: dict[int, User] = {}
        for function in _PROCESSES:
            for process in self._attempt(function, partial(self._calls.ask, function)) or ():
                used = process.usedGpuMemory
                known = used is not None and 0 <= used < _MOST_USED_BYTES
                user = User(int(process.pid), int(used) if known else None)
                if user.pid not in users or users[user.pid].used_bytes is None:
                    users[user.pid] = user
        return tuple(users.values())


class Gpus:
    """All devices of the node. `read` may hang with the driver, so a Sampler's thread calls it."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._lib: Any = None
        self._clock = clock
        self._wall_ns = wall_ns
        # The start of the driver's counters: when the driver was loaded, which is mostly at boot.
        self._loaded_ns = boot_ns()
        # The driver's version; empty while the driver is not open.
        self._version = ""
        self._remark = ""
        # A sentence on each GPU that did not answer when the GPUs were last listed.
        self._silent: list[str] = []
        self._watched: list[_Watched] = []
        self._find_at = 0.0
        # Counts of each GPU's faults. They are kept while the driver is closed, and while the GPU
        # does not answer.
        self._xids: dict[Device, Xids] = {}

    def read(self) -> GpuSample:
        """Read all devices."""
        now = self._clock()
        devices: tuple[DeviceSample, ...] = ()
        try:
            if now >= self._find_at:
                self._find_at = now + _FIND_EVERY_S
                self._find_devices()
            devices = tuple(each.read(self._loaded_ns, self._gpm) for each in self._watched)
            lost = [each.lost for each in self._watched if each.lost]
            if lost and len(lost) == len(devices):
                raise DeviceLost(lost[0])
        except _DriverMissing as why:
            self.close(str(why))
        except DeviceLost as why:
            self.close(f"The GPU driver went away ({why}); it is opened again when it is back.")
            devices = ()
        return GpuSample(self._with_faults(devices), self._remarks(), self._version)

    def _with_faults(self, devices: Sequence[DeviceSample]) -> tuple[DeviceSample, ...]:
        """Add each GPU's fault counts to its sample. A GPU that no longer answers gets a sample
        that has only these counts."""
        found = {each.device: each for each in devices}
        for board, xids in self._xids.items():
            if faults := xids.measurements(board.pci):
                own = [
                    each._replace(attributes=identity(board) + each.attributes) for each in faults
                ]
                known = found.get(board) or DeviceSample(board, (), ())
                found[board] = known._replace(measurements=(*own, *known.measurements))
        return tuple(found.values())

    def _gpm(self, calls: Calls) -> GpmSamples:
        return GpmSamples(calls, self._clock, self._wall_ns)

    def _remarks(self) -> str:
        lost = [
            f"GPU {each.device.index} ({each.device.name}) does not answer any more: {each.lost}."
            for each in self._watched
            if each.lost
        ]
        return " ".join([self._remark, *lost, *self._silent]).strip()

    # -- the driver

    def _open(self) -> str:
        """Open NVML; returns the driver's version."""
        # Import pynvml here, so that an agent that samples no GPUs doesn't spend memory on it.
        import pynvml

        self._lib = pynvml
        try:
            pynvml.nvmlInit()
            self._version = "NVIDIA driver"
            return f"NVIDIA driver {pynvml.nvmlSystemGetDriverVersion()}"
        except pynvml.NVMLError as error:
            is_missing = error.value in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)
            what = (
                "There is no NVIDIA driver" if is_missing else "The NVIDIA driver does not answer"
            )
            hint = f"see `nvidia-smi`; {_IN_CONTAINERS}"
            raise _DriverMissing(f"{what} ({error}): {hint}.") from error

    def close(self, remark: str = "") -> None:
        """Release everything; never raises."""
        self._remark, self._silent = remark, []
        for each in self._watched:
            each.close()
        self._watched = []
        if self._version:
            self._version = ""
            with contextlib.suppress(self._lib.NVMLError):
                self._lib.nvmlShutdown()

    # -- finding devices

    def _find_devices(self) -> None:
        """Open the driver, unless it is open, and list its devices."""
        # Close NVML if a GPU does not answer: a GPU that was reset is listed only after NVML is
        # opened again.
        if self._silent or any(each.lost for each in self._watched):
            self.close()
        self._version = self._version or self._open()
        found = list(self._found())
        # After any change, replace all devices, since their handles may have changed.
        if [each.device for each in found] != [each.device for each in self._watched]:
            for each in self._watched:
                each.close()
            self._watched = found
        self._remark = "" if self._watched else _NO_DEVICES

    def _found(self) -> Iterator[_Watched]:
        """All devices, in the order of their indices."""
        try:
            count = self._lib.nvmlDeviceGetCount()
        except self._lib.NVMLError as error:
            raise DeviceLost("the driver no longer counts its devices") from error
        self._silent = []
        for index in range(count):
            try:
                calls = Calls(self._lib, self._lib.nvmlDeviceGetHandleByIndex(index))
                board = _board(calls, index)
            except (NotSupported, DeviceLost, self._lib.NVMLError) as error:
                # Go on with the other GPUs if this one does not answer.
                where = "see `nvidia-smi`, and the kernel's log for Xid"
                sentence = f"GPU {index} does not answer ({error}): {where}."
                self._silent.append(sentence)
                errors.warn_once(f"gpu {sentence}", "GPU: %s", sentence)
                continue
            xids = self._xids.setdefault(board, Xids(self._wall_ns()))
            yield _Watched(board, calls, xids)


def _board(calls: Calls, index: int) -> Device:
    uuid, name = calls.ask("nvmlDeviceGetUUID"), calls.ask("nvmlDeviceGetName")
    return Device(uuid, str(index), name, calls.ask("nvmlDeviceGetPciInfo").busId)
