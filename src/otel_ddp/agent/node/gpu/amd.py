"""AMD's GPUs, by the files of the kernel's driver amdgpu."""

from __future__ import annotations

import errno
import os
import platform
import re
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
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind, Metric

_MOVING_S, _COUNTING_S, _SETTLED_S = 1.0, 5.0, 10.0
_MICRO, _MILLI = 1e6, 1e3
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SENSOR = re.compile(r"([a-z]+)(\d+)_label")
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENODATA, errno.EACCES}
_GONE = {errno.ENOENT, errno.ENODEV, errno.ENXIO}


class _Row(NamedTuple):
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


class _Board(NamedTuple):
    """A board that this container was given."""

    device: Device
    paths: Mapping[str, str]
    """Where each file is, by the name that a row gives it."""


_ROWS = (
    _Row(catalog.HW_GPU_UTILIZATION, _MOVING_S, ("gpu_busy_percent",), 100, "general"),
    _Row(catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION, _MOVING_S, ("mem_busy_percent",), 100),
    _Row(catalog.HW_GPU_MEMORY_USAGE, _MOVING_S, ("mem_info_vram_used",)),
    _Row(catalog.HW_GPU_MEMORY_LIMIT, _MOVING_S, ("mem_info_vram_total",)),
    _Row(
        catalog.HW_TEMPERATURE,
        _MOVING_S,
        # Boards of data centres have no sensor at the edge.
        ("hwmon/temp.edge_input", "hwmon/temp.junction_input"),
        _MILLI,
        "core",
    ),
    _Row(catalog.HW_TEMPERATURE, _MOVING_S, ("hwmon/temp.mem_input",), _MILLI, "memory"),
    # It depends on the board whether the driver has the mean or the moment.
    _Row(
        catalog.HW_POWER,
        _MOVING_S,
        ("hwmon/power1_average", "hwmon/power1_input"),
        _MICRO,
    ),
    _Row(catalog.OTEL_DDP_GPU_POWER_LIMIT, _SETTLED_S, ("hwmon/power1_cap",), _MICRO),
    _Row(catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY, _MOVING_S, ("hwmon/freq.sclk_input",), word="core"),
    _Row(
        catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY,
        _MOVING_S,
        ("hwmon/freq.mclk_input",),
        word="memory",
    ),
    _Row(catalog.HW_FAN_SPEED_RATIO, _SETTLED_S, ("hwmon/pwm1",), 255, "0"),
    _Row(catalog.HW_ERRORS, _COUNTING_S, ("ras/umc_err_count",), 1, "corrected", "ce"),
    _Row(catalog.HW_ERRORS, _COUNTING_S, ("ras/umc_err_count",), 1, "uncorrected", "ue"),
    _Row(catalog.OTEL_DDP_GPU_PCIE_REPLAYS, _SETTLED_S, ("pcie_replay_count",)),
)


class Amd:
    """The boards of amdgpu: no library, and no permission beyond the device's own.

    A board in partitions is one device.
    """

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._sys, self._dev = sys, dev
        # A kernel's driver counts since it was loaded: at boot or, seldom, later.
        self._loaded_ns = boot_ns()
        self._boards: dict[str, _Board] = {}

    @property
    def silent(self) -> Sequence[str]:
        return ()

    def open(self) -> None:
        there, given = self._listed()
        if not there:
            raise NothingHere("There is no AMD GPU to read here (kernel driver amdgpu).")
        if not given:
            raise DriverMissing(
                "The machine has AMD GPUs, but this container was given none: start it with their "
                "files in /dev/dri."
            )

    def close(self) -> None:
        self._boards = {}

    def version(self) -> str:
        return f"AMD driver amdgpu of Linux {platform.release()}"

    def devices(self) -> Sequence[Device]:
        boards = [
            _board(folder, address, str(index))
            for index, (address, folder) in enumerate(self._listed()[1])
        ]
        if not boards:
            raise DeviceLost("the kernel no longer lists its boards")
        self._boards = {each.device.uuid: each for each in boards}
        return tuple(each.device for each in boards)

    def _listed(self) -> tuple[bool, list[tuple[str, str]]]:
        """Whether there are any boards, and the address and the folder of those given to us."""
        drivers = str(self._sys / "bus/pci/drivers/amdgpu")
        boards = [
            (address, f"{drivers}/{address}")
            for address in filter(_ADDRESS.fullmatch, _names_in(drivers))
        ]
        # A container gets this file with its device. /sys shows the machine's devices.
        nodes = set(_names_in(str(self._dev / "dri")))
        given = [each for each in boards if nodes.intersection(_names_in(f"{each[1]}/drm"))]
        return bool(boards), sorted(given)

    def questions(self, device: Device) -> Sequence[Question[Measurement]]:
        board = self._known(device)
        found = []
        for row in _ROWS:
            path = next((board.paths[each] for each in row.files if each in board.paths), None)
            if path is not None:
                name = f"{row.metric.name} {row.word}".strip()
                found.append(Question(name, row.every_s, partial(self._ask, row, path, device.pci)))
        return found

    def _known(self, device: Device) -> _Board:
        """The board that was listed as this device."""
        try:
            return self._boards[device.uuid]
        except KeyError:
            raise DeviceLost("the kernel no longer lists it") from None

    def _ask(self, row: _Row, path: str, pci: str) -> Iterable[Measurement]:
        value = _number(path, row.line) / row.per
        if row.metric is catalog.OTEL_DDP_GPU_POWER_LIMIT and not value:
            return ()  # 0 means that no limit is set
        address = [("pci", pci)] if "pci" in row.metric.attributes else []
        last = [(row.metric.attributes[-1], row.word)] if row.word else []
        start_ns = self._loaded_ns if row.metric.kind is Kind.COUNTER else 0
        return (Measurement(row.metric, value, (*address, *last), start_ns),)

    def users(self, device: Device) -> Sequence[User]:
        kfd = str(self._sys / "class/kfd/kfd")
        mine = self._number_of(kfd, device.pci)
        found = []
        for pid in _names_in(f"{kfd}/proc") if mine else ():
            used = files.read_text(f"{kfd}/proc/{pid}/vram_{mine}")
            # Every process of ROCm opens all boards; one computes where it holds memory.
            if pid.isdecimal() and used and (used_bytes := int(used)):
                found.append(User(int(pid), used_bytes))
        return found

    @staticmethod
    def _number_of(kfd: str, pci: str) -> str:
        """What the compute driver calls the board at this address; empty if it has none."""
        for node in _names_in(f"{kfd}/topology/nodes"):
            here = f"{kfd}/topology/nodes/{node}"
            lines = (files.read_text(f"{here}/properties") or "").splitlines()
            said = dict(each.split(None, 1) for each in lines if " " in each)
            place = int(said.get("location_id", "0"))
            address = f"{int(said.get('domain', '0')):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}"
            if place and pci.startswith(address):
                return (files.read_text(f"{here}/gpu_id") or "").strip()
        return ""


def _board(folder: str, address: str, index: str) -> _Board:
    serial = (files.read_text(f"{folder}/unique_id") or "").strip()
    product = (files.read_text(f"{folder}/product_name") or "").strip()
    kind = (files.read_text(f"{folder}/device") or "").strip().removeprefix("0x")
    # As rocminfo spells it; the address does for boards that the driver has no number of.
    uuid = f"GPU-{serial}" if serial.strip("0") else address
    name = product or f"AMD GPU {kind}".strip()
    return _Board(Device(uuid, index, name, address), _paths(folder))


def _number(path: str, line: str = "") -> float:
    """The file's number, or that of one of its lines; raises as a Question does."""
    content = _text(path)
    if line:
        content = dict(each.split(":", 1) for each in content.splitlines() if ":" in each)[line]
    return float(int(content))


def _text(path: str) -> str:
    """What is in the file; raises as a Question does."""
    try:
        return files.read(path).decode("utf-8", "replace").strip()
    except OSError as error:
        if error.errno in _GONE:
            raise DeviceLost("the kernel has taken its files away") from error
        if error.errno in _UNSUPPORTED:
            raise NotSupported from error
        raise


def _names_in(folder: str) -> list[str]:
    """The names in a folder; none where there is no such folder."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _paths(folder: str) -> dict[str, str]:
    """The files of a board, of its sensors and of its error counts."""
    found = {name: f"{folder}/{name}" for name in _names_in(folder)}
    for name in _names_in(f"{folder}/ras"):
        found[f"ras/{name}"] = f"{folder}/ras/{name}"
    for sensors in sorted(_names_in(f"{folder}/hwmon")):
        here = f"{folder}/hwmon/{sensors}"
        names = _names_in(here)
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
