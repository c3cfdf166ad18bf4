"""Takes the readings of each GPU, and drops the implausible ones."""

from __future__ import annotations

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


class DeviceSample(NamedTuple):
    """One device, its numbers, and the processes that compute on it."""

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

    def __init__(self, device: Device) -> None:
        self.device = device
        self.questions: list[Question] | None = None
        """None until the driver has listed them; without those that it does not support."""
        self.lost = ""
        """Why the device is no longer asked; empty while it answers."""


class Gpus:
    """The node's devices. `read` may hang with the driver: only a Sampler's thread calls it."""

    def __init__(self, driver: Nvml, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._driver = driver
        self._clock_ns = clock_ns
        # Empty while the driver is not open.
        self._version = ""
        self._remark = ""
        self._watched: list[_Watched] = []
        self._find_at_ns = 0

    def read(self) -> GpuSample:
        """Ask all questions."""
        now_ns = self._clock_ns()
        devices: tuple[DeviceSample, ...] = ()
        try:
            if now_ns >= self._find_at_ns:
                self._find_at_ns = now_ns + _FIND_EVERY_NS
                self._find_devices()
            devices = tuple(map(self._ask, self._watched))
            lost = [each.lost for each in self._watched if each.lost]
            if lost and len(lost) == len(devices):
                raise DeviceLost(lost[0])
        except DriverMissing as why:
            self._close(str(why))
        except DeviceLost as why:
            self._close(f"The GPU driver went away ({why}); it is opened again when it is back.")
            devices = ()
        return GpuSample(devices, self._remarks(), self._version)

    # -- finding devices

    def _find_devices(self) -> None:
        """Open the driver, if it is not open, and list its devices."""
        if any(each.lost for each in self._watched):
            # A board that was reset appears again only once the driver is opened anew.
            self._close("")
        if not self._version:
            self._version = self._driver.open()
        found = self._driver.devices()
        # All anew: a board that was repartitioned can answer other questions.
        if [*found] != [each.device for each in self._watched]:
            self._watched = [_Watched(device) for device in found]
        self._remark = "" if self._watched else "The GPU driver is there, but it shows no device."

    def _close(self, remark: str) -> None:
        self._remark = remark
        self._watched = []
        if self._version:
            self._driver.close()
            self._version = ""

    # -- asking

    def _ask(self, watched: _Watched) -> DeviceSample:
        device = watched.device
        found: list[Measurement] = []
        users: Sequence[User] = ()
        try:
            if not watched.lost:
                for question in self._questions(watched):
                    found += self._possible(device, question.name, self._answer(watched, question))
                users = self._attempt("users", partial(self._driver.users, device)) or ()
        except DeviceLost as why:
            # The other devices go on.
            watched.lost = str(why)
        return DeviceSample(device, tuple(found), tuple(users))

    def _questions(self, watched: _Watched) -> Sequence[Question]:
        """Those that the device supports, as far as is known."""
        if watched.questions is None:
            ask = partial(self._driver.questions, watched.device)
            if (asked := self._attempt("what can be asked", ask)) is not None:
                watched.questions = list(asked)
        return tuple(watched.questions or ())

    def _answer(self, watched: _Watched, question: Question) -> Iterable[Measurement]:
        """Nothing if this attempt failed, or if the device does not support it."""
        try:
            return self._attempt(question.name, lambda: tuple(question.ask())) or ()
        except NotSupported:
            if watched.questions is not None:
                watched.questions.remove(question)
            return ()

    def _possible(
        self, device: Device, name: str, found: Iterable[Measurement]
    ) -> Iterator[Measurement]:
        for each in found:
            if not math.isnan(each.value):
                yield each._replace(attributes=identity(device) + each.attributes)
                continue
            sentence = f"GPU {device.index} has impossible values of {each.metric.name}"
            errors.warn_once(f"gpu impossible {name}", "%s: they are left out.", sentence)

    def _attempt(self, what: str, ask: Callable[[], T]) -> T | None:
        """The answer; None if this attempt failed, which is logged."""
        try:
            return ask()
        except (NotSupported, DeviceLost):
            raise
        except errors.ANY_ERROR as why:
            text = "GPU: %s failed (%s: %s); it is tried again."
            errors.warn_once(f"gpu {what}", text, what, type(why).__name__, why)
            return None

    def _remarks(self) -> str:
        lost = [
            f"GPU {each.device.index} ({each.device.name}) does not answer any more: {each.lost}."
            for each in self._watched
            if each.lost
        ]
        silent = self._driver.silent if self._version else ()
        return " ".join([self._remark, *lost, *silent]).strip()
