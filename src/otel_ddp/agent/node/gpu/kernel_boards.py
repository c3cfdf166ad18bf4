"""Implements the GPU driver interface by files of the kernel; a vendor adds a table of them."""

from __future__ import annotations

import errno
import os
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from otel_ddp import files
from otel_ddp.agent.node.gpu.driver import (
    Device,
    DeviceLost,
    DriverMissing,
    NothingHere,
    NotSupported,
    Question,
    User,
)
from otel_ddp.agent.node.source import Measurement, boot_ns
from otel_ddp.vocabulary.catalog import OTEL_DDP_GPU_POWER_LIMIT, Kind, Metric

MOVING_S, COUNTING_S, SETTLED_S = 1.0, 5.0, 10.0
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SENSOR = re.compile(r"([a-z]+)(\d+)_label")
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENODATA, errno.EACCES}
_GONE = {errno.ENOENT, errno.ENODEV, errno.ENXIO}


class Row(NamedTuple):
    """A number of every board: the first of these files that a board has."""

    metric: Metric
    every_s: float
    files: tuple[str, ...]
    """Of the board's folder. `hwmon/temp.junction_input` is the sensor with that label."""
    per: float = 1.0
    """The file's number by this is ours."""
    word: str = ""
    """The value of the metric's last attribute."""
    line: str = ""
    """Which line has the number, of a file that has `ue: 3` and others."""


class Board(NamedTuple):
    """A board that this container was given."""

    device: Device
    paths: Mapping[str, str]
    """Where each file is, by the name that a row gives it."""


class KernelBoards(ABC):
    """The boards of one vendor. It needs no library, and no permission beyond the device's own."""

    vendor = ""
    modules: tuple[str, ...] = ()
    """The kernel's drivers of such boards."""
    hiding: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self.sys, self.dev = sys, dev
        # A kernel's driver counts since it was loaded: at boot or, seldom, later.
        self._loaded_ns = boot_ns()
        self._boards: dict[str, Board] = {}
        self._module = ""

    @property
    def silent(self) -> Sequence[str]:
        return ()

    def open(self) -> None:
        there, given = self._listed()
        if not there:
            drivers = " or ".join(self.modules)
            what = f"{self.vendor} GPU to read here (kernel driver {drivers})"
            raise NothingHere(f"There is no {what}.")
        if not given:
            raise DriverMissing(
                f"The machine has {self.vendor} GPUs, but this container was given none: start it "
                "with their files in /dev/dri."
            )

    def close(self) -> None:
        self._boards = {}

    def version(self) -> str:
        return f"{self.vendor} driver {self._module} of Linux {platform.release()}"

    def devices(self) -> Sequence[Device]:
        boards = [
            self.board(folder, address, str(index))
            for index, (address, folder) in enumerate(self._listed()[1])
        ]
        if not boards:
            raise DeviceLost("the kernel no longer lists its boards")
        self._boards = {each.device.uuid: each for each in boards}
        return tuple(each.device for each in boards)

    def _listed(self) -> tuple[bool, list[tuple[str, str]]]:
        """Whether there are any boards, and the address and the folder of those given to us."""
        nodes = set(names_in(str(self.dev / "dri")))
        there, given = False, []
        for module in self.modules:
            drivers = str(self.sys / "bus/pci/drivers" / module)
            for address in filter(_ADDRESS.fullmatch, names_in(drivers)):
                folder = f"{drivers}/{address}"
                if not self.is_board(folder):
                    continue
                there, self._module = True, module
                # A container gets this file with its device. /sys shows the machine's devices.
                if nodes.intersection(names_in(f"{folder}/drm")):
                    given.append((address, folder))
        return there, sorted(given)

    def board(self, folder: str, address: str, index: str) -> Board:
        uuid, name = self.identity(folder, address)
        return Board(Device(uuid, index, name, address), _paths(folder))

    def is_board(self, folder: str) -> bool:
        """Whether to list it."""
        return True

    @abstractmethod
    def identity(self, folder: str, address: str) -> tuple[str, str]:
        """The UUID, as torch tells it of the same board, and the name."""

    def questions(self, device: Device) -> Sequence[Question]:
        board = self.known(device)
        found = []
        for row in self.rows:
            path = next((board.paths[each] for each in row.files if each in board.paths), None)
            if path is not None:
                name = f"{row.metric.name} {row.word}".strip()
                found.append(Question(name, row.every_s, partial(self._ask, row, path, device.pci)))
        return found

    def known(self, device: Device) -> Board:
        """The board that was listed as this device."""
        try:
            return self._boards[device.uuid]
        except KeyError:
            raise DeviceLost("the kernel no longer lists it") from None

    def _ask(self, row: Row, path: str, pci: str) -> Iterable[Measurement]:
        value = number(path, row.line) / row.per
        if row.metric is OTEL_DDP_GPU_POWER_LIMIT and not value:
            return ()  # 0 means that no limit is set
        return (self.measurement(row.metric, value, pci, row.word),)

    def measurement(self, metric: Metric, value: float, pci: str, word: str = "") -> Measurement:
        address = [("pci", pci)] if "pci" in metric.attributes else []
        last = [(metric.attributes[-1], word)] if word else []
        start_ns = self._loaded_ns if metric.kind is Kind.COUNTER else 0
        return Measurement(metric, value, (*address, *last), start_ns)

    def users(self, device: Device) -> Sequence[User]:
        return ()


def number(path: str, line: str = "") -> float:
    """The file's number, or that of one of its lines; raises as a Question does."""
    content = text(path)
    if line:
        content = dict(each.split(":", 1) for each in content.splitlines() if ":" in each)[line]
    return float(int(content))


def text(path: str) -> str:
    """What is in the file; raises as a Question does."""
    try:
        return files.read(path).decode("utf-8", "replace").strip()
    except OSError as error:
        if error.errno in _GONE:
            raise DeviceLost("the kernel has taken its files away") from error
        if error.errno in _UNSUPPORTED:
            raise NotSupported from error
        raise


def names_in(folder: str) -> list[str]:
    """The names in a folder; none where there is no such folder."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _paths(folder: str) -> dict[str, str]:
    """The files of a board, and of its sensors, error counts and clocks."""
    found = {name: f"{folder}/{name}" for name in names_in(folder)}
    for within in ("ras", "tile0/gt0/freq0"):
        for name in names_in(f"{folder}/{within}"):
            found[f"{within}/{name}"] = f"{folder}/{within}/{name}"
    for sensors in sorted(names_in(f"{folder}/hwmon")):
        here = f"{folder}/hwmon/{sensors}"
        names = names_in(here)
        for name in names:
            found.setdefault(f"hwmon/{name}", f"{here}/{name}")
        for labelled in filter(None, map(_SENSOR.fullmatch, names)):
            kind, place = labelled.groups()
            label = files.read_text(f"{here}/{labelled[0]}") or ""
            for name in names:
                if name.startswith(prefix := f"{kind}{place}_"):
                    alias = f"hwmon/{kind}.{label.strip()}_{name.removeprefix(prefix)}"
                    found.setdefault(alias, f"{here}/{name}")
    return found
