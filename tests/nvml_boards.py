"""GPUs for tests: what the stand-in for NVIDIA's library shows, also to other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pynvml
import pytest

SOURCE = Path(__file__).parent / "nvml_standin" / "nvml.c"
GIB = 1 << 30

Numbers = dict[str, "int | float | str"]


@dataclass
class Instance:
    """A MIG instance; its number is its place in the board's list."""

    uuid: str
    name: str
    gi: int
    ci: int = 0
    numbers: Numbers = field(default_factory=dict)
    """By the keys of nvml.c; one that is not there is not supported."""
    compute: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass
class Board:
    """A board; change it and write it again, and it has changed for whoever looks."""

    uuid: str
    name: str
    pci: str
    numbers: Numbers = field(default_factory=dict)
    """By the keys of nvml.c; one that is not there is not supported."""
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    """Process and its bytes, None where those are not known."""
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    mps: list[tuple[int, int | None]] = field(default_factory=list)
    xids: list[int] | None = field(default_factory=list)
    """Grows: those that are put behind the others have just happened."""
    instances: list[Instance] = field(default_factory=list)
    lost: bool = False
    hang: bool = False
    """Every call sleeps until this is written to be over."""

    def without(self, *keys: str) -> Board:
        """The same one, which does not support these keys; `field.74` is one, `link.` several."""
        self.numbers = {
            key: value for key, value in self.numbers.items() if not key.startswith(keys)
        }
        return self


class Boards:
    """The file that the stand-in reads."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "nvml.txt"

    def environment(self, library: Path) -> dict[str, str]:
        """For a process that is to see these boards; *library* is that of standin_library."""
        before = os.environ.get("LD_LIBRARY_PATH")
        return {
            "NVML_STANDIN": str(self.path),
            "LD_LIBRARY_PATH": f"{library.parent}{os.pathsep + before if before else ''}",
        }

    def write(self, boards: Sequence[Board], **whole: int | str) -> None:
        """Show these boards from now on.

        Of the whole: `init`, the error of the library's start; `loaded=0`, no driver any more;
        `generation`, another one makes all handles void; `hang=1`, the start does not return.
        """
        lines = "".join(f"{key} {value}\n" for key, value in state(boards, **whole).items())
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(lines.encode("utf-8", "surrogateescape"))
        # At once, and never seen half written.
        fresh.replace(self.path)


def state(boards: Sequence[Board], **whole: int | str) -> dict[str, str]:
    """Key and value of all there is to know."""
    found: dict[str, object] = {"driver": "550.54.14", **whole, "count": len(boards)}
    for index, board in enumerate(boards):
        for key, value in _board(board):
            found[f"{index}.{key}"] = value
    return {key: str(value) for key, value in found.items()}


def _board(board: Board) -> Iterator[tuple[str, object]]:
    yield from {"uuid": board.uuid, "name": board.name, "pci": board.pci}.items()
    yield from board.numbers.items()
    for kind, users in (("compute", board.compute), ("graphics", board.graphics)):
        yield kind, _processes(users)
    yield "mps", _processes(board.mps)
    if board.xids is not None:
        yield "xids", " ".join(["", *map(str, board.xids)])
    yield from {"lost": int(board.lost), "hang": int(board.hang)}.items()
    if board.instances:
        yield from {"mig.mode": 1, "mig.most": 7}.items()
    for index, part in enumerate(board.instances):
        own = {"uuid": part.uuid, "name": part.name, "gi": part.gi, "ci": part.ci}
        for key, value in {**own, **part.numbers, "compute": _processes(part.compute)}.items():
            yield f"mig.{index}.{key}", value


def _processes(users: Sequence[tuple[int, int | None]]) -> str:
    return " ".join(["", *(f"{pid}:{'-' if used is None else used}" for pid, used in users)])


def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built once a session; it lies alone in its directory."""
    directory = tmp_path_factory.getbasetemp() / "nvml-standin"
    library = directory / "libnvidia-ml.so.1"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler, for the stand-in of NVIDIA's library")
    directory.mkdir(exist_ok=True)
    fresh = directory / "fresh.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", fresh, SOURCE], check=True)
    return fresh.replace(library)


def h100(index: int = 0) -> Board:
    """A board that has everything."""
    numbers: Numbers = {
        "utilization.gpu": 87,
        "utilization.memory": 41,
        "utilization.encoder": 0,
        "utilization.decoder": 3,
        "memory.total": 80 * GIB,
        "memory.reserved": GIB // 2,
        "memory.used": 60 * GIB,
        "power_mw": 111_000,
        "power_limit_mw": 700_000,
        "energy_mj": 123_456_789,
        "temperature": 64,
        "fans": 2,
        "fan.0": 30,
        "fan.1": 35,
        "clock_mhz.1": 1980,
        "clock_mhz.2": 2619,
        "event_reasons": 0x25,
        "replays": 2,
        "link.generation.current": 4,
        "link.generation.max": 5,
        "link.width.current": 8,
        "link.width.max": 16,
        "ecc.0.0": 12,
        "ecc.1.0": 1,
        "ecc.0.1": 9000,
        "ecc.1.1": 80,
        "remapped.corrected": 3,
        "remapped.uncorrected": 1,
        "mig.mode": 0,
        "mig.most": 7,
        "gpm": 1,
        **{f"gpm.{number}": value for number, value in _GPM.items()},
        **{f"field.{key}": f"{kind} {value}" for key, (kind, value) in _FIELDS.items()},
    }
    uuid = f"GPU-{index:08x}-7a5b-4c3d-9e1f-0123456789ab"
    return Board(uuid, "NVIDIA H100 80GB HBM3", f"00000000:{index + 0x1B:02X}:00.0", numbers)


# Type of value, value: 1 has 32 bits, 3 has 64.
_FIELDS = {
    "74": (3, 4_000_000_000),
    "75": (3, 500_000_000),
    "76": (3, 0),
    "77": (3, 0),
    "79": (3, 0),
    "82": (1, 71),
    "91": (1, 18),
    "186": (1, 412_345),
    "197": (3, 5 << 32),
    "198": (3, 6 << 32),
    "138.all": (3, 1_000_000),
    "139.all": (3, 2_000_000),
    "38": (3, 1),
    "45": (3, 0),
    "52": (3, 4),
    "59": (3, 0),
}
_GPM = {2: 63.5, 5: 41.0, 10: 55.25, 11: 0.0, 12: 7.0, 13: 2.0, 20: 100.0, 21: 300.0}


def t4(index: int = 0) -> Board:
    """A small board of an earlier time: no NVLink, no GPM, few fields, no fan."""
    board = h100(index)
    board.name = "Tesla T4"
    board.numbers |= {"memory.total": 16 * GIB, "memory.used": 5 * GIB, "fans": 0}
    board.numbers |= {"violation.0": 4_000_000_000, "violation.1": 500_000_000}
    board.numbers |= {"violation.2": 0, "violation.3": 0, "violation.5": 0}
    board.numbers["throttle_reasons"] = board.numbers["event_reasons"]
    board.numbers |= {"memory.reserved": "!13", "event_reasons": "!13"}
    return board.without("gpm", "field.", "remapped", "mig.", "fan.")


def laptop(index: int = 0) -> Board:
    """A board without a limit of power, without checked memory and without faults to report."""
    board = h100(index)
    board.name = "NVIDIA GeForce RTX 3080 Laptop GPU"
    board.xids = None
    board.numbers |= {"field.197": "1 3020371496", "field.198": "1 3893142392"}
    return board.without("gpm", "power_limit", "ecc.", "fan", "field.138", "field.139", "mig.")


def a100_mig(index: int = 0) -> Board:
    """A board that is divided: one half, one small part, and nothing under number 1."""
    board = h100(index)
    board.name = "NVIDIA A100-SXM4-40GB"
    # An earlier board than those with GPM; and busy is only what its parts are.
    board.without("gpm", "utilization.")
    board.numbers |= {"utilization.gpu": "!3", "mig.mode": 1}
    memory: Numbers = {"memory.reserved": 0, "memory.total": 20 * GIB, "memory.used": 7 * GIB}
    small: Numbers = {**memory, "memory.total": 5 * GIB, "memory.used": GIB}
    board.instances = [
        Instance(f"MIG-{index:08x}-aaaa-4c3d-9e1f-0123456789ab", "MIG 3g.20gb", 2, 0, memory),
        Instance(f"MIG-{index:08x}-bbbb-4c3d-9e1f-0123456789ab", "MIG 1g.5gb", 9, 0, small),
    ]
    return board


class FakeNvml:
    """Looks like the module pynvml. What it lacks of functions, that driver lacks."""

    _NUMBERS: ClassVar = {
        "nvmlDeviceGetUUID": "uuid",
        "nvmlDeviceGetName": "name",
        "nvmlDeviceGetPowerUsage": "power_mw",
        "nvmlDeviceGetEnforcedPowerLimit": "power_limit_mw",
        "nvmlDeviceGetTotalEnergyConsumption": "energy_mj",
        "nvmlDeviceGetNumFans": "fans",
        "nvmlDeviceGetFanSpeed_v2": "fan.{}",
        "nvmlDeviceGetClockInfo": "clock_mhz.{}",
        "nvmlDeviceGetTotalEccErrors": "ecc.{}.{}",
        "nvmlDeviceGetPcieReplayCounter": "replays",
        "nvmlDeviceGetCurrPcieLinkGeneration": "link.generation.current",
        "nvmlDeviceGetMaxPcieLinkGeneration": "link.generation.max",
        "nvmlDeviceGetCurrPcieLinkWidth": "link.width.current",
        "nvmlDeviceGetMaxPcieLinkWidth": "link.width.max",
        "nvmlDeviceGetMaxMigDeviceCount": "mig.most",
        "nvmlDeviceGetGpuInstanceId": "gi",
        "nvmlDeviceGetComputeInstanceId": "ci",
        "nvmlDeviceGetCurrentClocksEventReasons": "event_reasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons": "throttle_reasons",
    }

    def __init__(self) -> None:
        self.state: dict[str, str] = {}
        self.open = 0
        self.held = 0
        """Event sets and samples that were not given back."""

    def __getattr__(self, name: str) -> Any:
        key = self._NUMBERS.get(name)
        if key is not None:
            return lambda handle, *which: self._ask(handle, key.format(*which))
        if name.startswith("nvml") and callable(getattr(pynvml, name, None)):
            raise AttributeError(name)  # or the fake would ask a real driver
        return getattr(pynvml, name)

    def _number(self, key: str, otherwise: int) -> int:
        return int(self.state.get(key, otherwise))

    def _alive(self, handle: Any = None) -> None:
        if not self.open:
            raise pynvml.NVMLError(1)
        if not self._number("loaded", 1):
            raise pynvml.NVMLError(9)
        if handle is not None:
            if handle.generation != self._number("generation", 1):
                raise pynvml.NVMLError(2)
            if self._number(f"{handle.board}.lost", 0):
                raise pynvml.NVMLError(15)

    def _ask(self, handle: Any, key: str) -> Any:
        self._alive(handle)
        part = "" if handle.part is None else f"mig.{handle.part}."
        said = self.state.get(f"{handle.board}.{part}{key}", "!3")
        if said.startswith("!"):
            raise pynvml.NVMLError(int(said[1:]))
        return int(said) if said.isdecimal() else said

    def _handle(self, board: int, part: int | None = None) -> Any:
        generation = self._number("generation", 1)
        return SimpleNamespace(board=board, part=part, generation=generation)

    def nvmlInit(self) -> None:
        for code in (self._number("init", 0), 0 if self._number("loaded", 1) else 9):
            if code:
                raise pynvml.NVMLError(code)
        self.open += 1

    def nvmlShutdown(self) -> None:
        assert self.open
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self.state["driver"].encode()

    def nvmlDeviceGetCount(self) -> int:
        self._alive()
        return self._number("count", 0)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        handle = self._handle(index)
        self._alive(handle)
        return handle

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=self._ask(handle, "pci"))

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        gpu, memory = (self._ask(handle, f"utilization.{of}") for of in ("gpu", "memory"))
        return SimpleNamespace(gpu=gpu, memory=memory)

    def nvmlDeviceGetEncoderUtilization(self, handle: Any) -> list[int]:
        return [self._ask(handle, "utilization.encoder"), 1_000_000]

    def nvmlDeviceGetDecoderUtilization(self, handle: Any) -> list[int]:
        return [self._ask(handle, "utilization.decoder"), 1_000_000]

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._ask(handle, "temperature")

    def nvmlDeviceGetTemperatureV(self, handle: Any, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._ask(handle, "temperature_v")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        total, used = (self._ask(handle, f"memory.{of}") for of in ("total", "used"))
        if version is not None:
            assert version == pynvml.nvmlMemory_v2
            self._ask(handle, "memory.reserved")
        else:
            reserved = self._handle_state(handle, "memory.reserved")
            used += int(reserved) if reserved.isdecimal() else 0
        return SimpleNamespace(total=total, used=used)

    def _handle_state(self, handle: Any, key: str) -> str:
        return self.state.get(f"{handle.board}.{key}", "")

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        rows = (self._ask(handle, f"remapped.{of}") for of in ("corrected", "uncorrected"))
        return (*rows, 0, 0)

    def nvmlDeviceGetViolationStatus(self, handle: Any, policy: int) -> Any:
        return SimpleNamespace(violationTime=self._ask(handle, f"violation.{policy}"))

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: Any) -> Any:
        self._alive(handle)
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, (number, scope) in zip(values, fields, strict=True):
            name = f".{'all' if scope == 0xFFFFFFFF else scope}" if scope else ""
            try:
                kind, said = str(self._ask(handle, f"field.{number}{name}")).split()
            except pynvml.NVMLError as error:
                value.nvmlReturn = error.value
                continue
            value.valueType = int(kind)
            member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[int(kind)]
            setattr(value.value, member, float(said) if kind == "0" else int(said))
        return values

    def _processes(self, handle: Any, kind: str) -> list[Any]:
        pairs = [each.split(":") for each in str(self._ask(handle, kind)).split()]
        return [
            SimpleNamespace(pid=int(pid), usedGpuMemory=None if used == "-" else int(used))
            for pid, used in pairs
        ]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> list[Any]:
        return self._processes(handle, "compute")

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Any) -> list[Any]:
        return self._processes(handle, "compute_v2")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> list[Any]:
        return self._processes(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any) -> list[Any]:
        return self._processes(handle, "mps")

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        return [self._ask(handle, "mig.mode")] * 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        self._alive(handle)
        if f"{handle.board}.mig.{index}.uuid" not in self.state:
            raise pynvml.NVMLError(6)
        return self._handle(handle.board, index)

    def nvmlEventSetCreate(self) -> Any:
        self.held += 1
        return SimpleNamespace(handle=None, told=0)

    def nvmlEventSetFree(self, events: Any) -> None:
        self.held -= 1

    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, events: Any) -> None:
        assert types == pynvml.nvmlEventTypeXidCriticalError
        events.told = len(str(self._ask(handle, "xids")).split())
        events.handle = handle

    def nvmlEventSetWait(self, events: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "the agent never waits"
        codes = self.state[f"{events.handle.board}.xids"].split()
        if events.told < len(codes):
            events.told += 1
            return SimpleNamespace(eventType=8, eventData=int(codes[events.told - 1]))
        self._alive(events.handle)
        raise pynvml.NVMLError(10)

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> Any:
        return SimpleNamespace(isSupportedDevice=self._ask(handle, "gpm"))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.held += 1
        return SimpleNamespace(of=None)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.held -= 1

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> None:
        self._ask(handle, "gpm")
        sample.of = handle

    def nvmlGpmMigSampleGet(self, handle: Any, instance: int, sample: Any) -> None:
        assert handle.part is None, "asked of the board, by the number of the instance"
        parts = (self._handle(handle.board, part) for part in range(8))
        sample.of = next(part for part in parts if self._ask(part, "gi") == instance)

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(32)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        assert asked.sample1 is not asked.sample2
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn, metric.value = 0, 0.0
            try:
                metric.value = float(self._ask(asked.sample2.of, f"gpm.{metric.metricId}"))
            except pynvml.NVMLError as error:
                metric.nvmlReturn = error.value
