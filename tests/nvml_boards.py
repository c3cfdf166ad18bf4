"""GPUs for tests: what the stand-in for NVIDIA's library shows, also to other processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest

SOURCE = Path(__file__).parent / "nvml_standin" / "nvml.c"
GIB = 1 << 30

Numbers = dict[str, "int | float | str"]


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
    mps: list[tuple[int, int | None]] = field(default_factory=list)
    xids: list[int] | None = field(default_factory=list)
    """Grows: those that are put behind the others have just happened."""
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
        found: dict[str, object] = {"driver": "550.54.14", **whole, "count": len(boards)}
        for index, board in enumerate(boards):
            found |= {f"{index}.{key}": value for key, value in _board(board)}
        lines = "".join(f"{key} {value}\n" for key, value in found.items())
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(lines.encode("utf-8", "surrogateescape"))
        # At once, and never seen half written.
        fresh.replace(self.path)


def _board(board: Board) -> Iterator[tuple[str, object]]:
    yield from {"uuid": board.uuid, "name": board.name, "pci": board.pci}.items()
    yield from board.numbers.items()
    for kind in ("compute", "mps"):
        yield kind, _processes(getattr(board, kind))
    if board.xids is not None:
        yield "xids", " ".join(["", *map(str, board.xids)])
    yield from {"lost": int(board.lost), "hang": int(board.hang)}.items()


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


def show_here(boards: Boards, library: Path, patch: pytest.MonkeyPatch) -> Any:
    """Let pynvml in this process see these boards; the library, to ask what is held of it."""
    patch.setenv("NVML_STANDIN", str(boards.path))
    patch.setattr(pynvml, "nvmlLib", loaded := ctypes.CDLL(str(library)))
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return loaded


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
        "clock_mhz.1": 1980,
        "clock_mhz.2": 2619,
        "event_reasons": 0x25,
        "replays": 2,
        "link.width.current": 8,
        "link.width.max": 16,
        "ecc.0.0": 12,
        "ecc.1.0": 1,
        "ecc.0.1": 9000,
        "ecc.1.1": 80,
        "remapped.corrected": 3,
        "remapped.uncorrected": 1,
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
