"""Takes the readings of each GPU when they are due, and drops the implausible ones."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from otel_ddp import errors
from otel_ddp.agent.node.gpu.nvml import Device, DriverMissing, Nvml, User
from otel_ddp.agent.node.gpu.nvml_questions import DeviceLost, NotSupported, Question
from otel_ddp.agent.node.source import Measurement

T = TypeVar("T")
Attributes = tuple[tuple[str, str], ...]

_S = 1_000_000_000
# A driver may be loaded later or again, a board added or reset, or MIG set up anew.
_FIND_EVERY_NS = 60 * _S
# Three calls a board, so no more often than a person would notice a new process.
_USERS_EVERY_S = 2.0


class DeviceSample(NamedTuple):
    """One device, its fresh numbers, and the processes that compute on it."""

    device: Device
    measurements: tuple[Measurement, ...]
    users: tuple[User, ...]


class GpuSample(NamedTuple):
    """All devices at one moment."""

    devices: tuple[DeviceSample, ...]
    remark: str
    """Why devices are missing; empty if all is well."""
    version: str


def identity(device: Device) -> Attributes:
    """The first attributes of every metric in the catalogue's GPU section."""
    return (
        *(("hw.id", device.uuid), ("hw.type", "gpu")),
        *(("hw.model", device.name), ("gpu", device.index)),
    )


class _Watched:
    """A device, and the questions that it is asked."""

    def __init__(self, driver: Nvml, device: Device) -> None:
        self.device = device
        self.users = Question("users", _USERS_EVERY_S, lambda: driver.users(device))
        self.questions: Sequence[Question[Measurement]] | None = None
        """None until the driver has listed them."""
        self.lost = ""
        """Why the device is no longer asked; empty while it answers."""

    def sample(self, now_ns: int) -> DeviceSample:
        fresh = (each.fresh(now_ns) for each in self.questions or ())
        measurements = tuple(itertools.chain.from_iterable(fresh))
        return DeviceSample(self.device, measurements, self.users.fresh(now_ns))


class Gpus:
    """The node's devices. `read` may hang with the driver: only a Sampler's thread calls it."""

    def __init__(self, driver: Nvml, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._driver = driver
        self._clock_ns = clock_ns
        # Empty while the driver is not open.
        self._version = ""
        self._remark = ""
        self.errors = 0
        """How many numbers could not be read or were impossible."""
        self._watched: list[_Watched] = []
        self._find_at_ns = 0

    def read(self) -> GpuSample:
        """Ask the questions that are due."""
        now_ns = self._clock_ns()
        try:
            if now_ns >= self._find_at_ns:
                self._find_at_ns = now_ns + _FIND_EVERY_NS
                self._find_devices(now_ns)
            self._ask_all(now_ns)
        except DriverMissing as why:
            self._close(str(why))
        except DeviceLost as why:
            self._close(f"The GPU driver went away ({why}); it is opened again when it is back.")
        return self._sample(now_ns)

    # -- finding devices

    def _find_devices(self, now_ns: int) -> None:
        """Open the driver, if it is not open, and list its devices."""
        if any(each.lost for each in self._watched):
            # A board that was reset appears again only once the driver is opened anew.
            self._close("")
        if not self._version:
            version = self._attempt("opening the driver", self._driver.open)
            if version is None:
                raise DriverMissing("The GPU driver could not be opened; the agent's log says why.")
            self._version = version
        found = self._attempt("the list of devices", self._driver.devices)
        if found is None and not self._watched:
            raise DeviceLost("its devices could not be listed")
        # All anew: a board that was repartitioned can answer other questions.
        if found is not None and [*found] != [each.device for each in self._watched]:
            self._watched = [_Watched(self._driver, device) for device in found]
        self._remark = "" if self._watched else "The GPU driver is there, but it shows no device."

    def _close(self, remark: str) -> None:
        self._remark = remark
        self._watched = []
        if self._version:
            self._driver.close()
            self._version = ""

    # -- asking

    def _ask_all(self, now_ns: int) -> None:
        for watched in self._watched:
            if not watched.lost:
                self._ask(watched, now_ns)
        lost = [each.lost for each in self._watched if each.lost]
        if lost and len(lost) == len(self._watched):
            raise DeviceLost(lost[0])

    def _ask(self, watched: _Watched, now_ns: int) -> None:
        device, users = watched.device, watched.users
        try:
            if watched.questions is None:
                list_all = partial(self._driver.questions, device)
                watched.questions = self._attempt("what can be asked", list_all)
            for question in watched.questions or ():
                if (answer := self._answer(question, now_ns)) is not None:
                    question.keep(self._possible(device, question.name, answer), now_ns)
            if (seen := self._answer(users, now_ns)) is not None:
                users.keep(seen, now_ns)
        except DeviceLost as why:
            # The other devices go on; answers of this one are shown while they are fresh.
            watched.lost = str(why)

    def _answer(self, question: Question[T], now_ns: int) -> Iterable[T] | None:
        """None: it is not due, or this attempt failed."""
        if not question.due(now_ns):
            return None
        try:
            return self._attempt(question.name, lambda: tuple(question.ask()))
        except NotSupported:
            question.is_unsupported = True
            return None

    def _possible(
        self, device: Device, name: str, found: Iterable[Measurement]
    ) -> Iterator[Measurement]:
        for each in found:
            if _is_possible(each):
                yield each._replace(attributes=identity(device) + each.attributes)
                continue
            self.errors += 1
            sentence = f"GPU {device.index} has impossible values of {each.metric.name}"
            errors.warn_once(f"gpu impossible {name}", "%s: they are left out.", sentence)

    def _attempt(self, what: str, ask: Callable[[], T]) -> T | None:
        """The answer; None if this attempt failed, which is counted."""
        try:
            return ask()
        except (DriverMissing, NotSupported, DeviceLost):
            raise
        except errors.ANY_ERROR as why:
            self.errors += 1
            text = "GPU: %s failed (%s: %s); it is tried again."
            errors.warn_once(f"gpu {what}", text, what, type(why).__name__, why)
            return None

    def _sample(self, now_ns: int) -> GpuSample:
        left = [
            f"GPU {each.device.index} ({each.device.name}) does not answer any more: {each.lost}."
            for each in self._watched
            if each.lost
        ]
        devices = tuple(each.sample(now_ns) for each in self._watched)
        silent = self._driver.silent if self._version else ()
        remark = " ".join([self._remark, *left, *silent]).strip()
        return GpuSample(devices, remark, self._version)


def _is_possible(measurement: Measurement) -> bool:
    """Whether a number is finite, not negative, and at most 1 if it is a ratio."""
    if not math.isfinite(measurement.value) or measurement.value < 0.0:
        return False
    return measurement.metric.unit != "1" or measurement.value <= 1.0
