"""Intel's GPUs, by the files of the kernel's drivers xe and i915."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.agent.node.gpu.driver import Device, Question, User
from otel_ddp.agent.node.gpu.kernel_boards import (
    COUNTING_S,
    MOVING_S,
    SETTLED_S,
    KernelBoards,
    Row,
    names_in,
    number,
)
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog

# Who uses boards is looked at so often at most, and with so much of a core.
_LOOK_EVERY_S, _LOOK_SHARE = 1.0, 0.01
_MICRO, _MILLI = 1e6, 1e3
_ENERGY = ("hwmon/energy1_input", "hwmon/energy2_input")
_MEMORY = re.compile(r"^drm-resident-(?:vram|local)\d*:\s*(\d+)(?: (KiB|MiB))?$", re.MULTILINE)
_CLIENT = re.compile(r"^drm-client-id:\s*(\d+)$", re.MULTILINE)
_ADDRESS = re.compile(r"^drm-pdev:\s*(\S+)$", re.MULTILINE)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


class Intel(KernelBoards):
    """Those of xe and i915 that have sensors: a processor's own graphics have none."""

    vendor = "Intel"
    modules = ("xe", "i915")
    # No value of ZE_AFFINITY_MASK hides all devices.
    hiding = ()
    rows = (
        Row(catalog.HW_TEMPERATURE, MOVING_S, ("hwmon/temp.pkg_input",), _MILLI, "core"),
        Row(catalog.HW_TEMPERATURE, MOVING_S, ("hwmon/temp.vram_input",), _MILLI, "memory"),
        Row(catalog.HW_ENERGY, COUNTING_S, _ENERGY, _MICRO),
        Row(catalog.OTEL_DDP_GPU_POWER_LIMIT, SETTLED_S, ("hwmon/power1_max",), _MICRO),
        Row(
            catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY,
            MOVING_S,
            ("tile0/gt0/freq0/act_freq",),
            1e-6,
            "core",
        ),
    )

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        **roots: Any,
    ) -> None:
        super().__init__(**roots)
        self._proc, self._clock = proc, clock
        self._users: dict[str, list[User]] = {}
        self._next_look = 0.0

    def is_board(self, folder: str) -> bool:
        return bool(names_in(f"{folder}/hwmon"))

    def identity(self, folder: str, address: str) -> tuple[str, str]:
        kind, revision = (
            int((files.read_text(f"{folder}/{name}") or "0").strip() or "0", 16)
            for name in ("device", "revision")
        )
        domain, bus, rest = address.split(":")
        place, function = rest.split(".")
        # As Intel's drivers make it for Level Zero, of what is known of the board on its bus.
        made = b"".join(
            each.to_bytes(2, "little") for each in (0x8086, kind, revision, int(domain, 16))
        ) + bytes((int(bus, 16), int(place, 16), int(function)))
        digits = made.hex().ljust(32, "0")
        cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
        return "-".join(digits[a:b] for a, b in cuts), f"Intel GPU {kind:04x}"

    def questions(self, device: Device) -> Sequence[Question]:
        paths = self.known(device).paths
        energy = next((paths[each] for each in _ENERGY if each in paths), None)
        found = [*super().questions(device)]
        if energy is not None:
            # The kernel has no power of these boards.
            power = Question("hw.power", MOVING_S, partial(self._power, device.pci, energy, []))
            found.append(power)
        return found

    def _power(
        self, pci: str, path: str, before: list[tuple[float, float]]
    ) -> Iterable[Measurement]:
        """The mean since it was asked last."""
        now, joules = self._clock(), number(path) / _MICRO
        last = before.pop() if before else None
        before.append((now, joules))
        if last is None or now <= last[0] or joules < last[1]:
            return ()
        watts = (joules - last[1]) / (now - last[0])
        return (self.measurement(catalog.HW_POWER, watts, pci),)

    def users(self, device: Device) -> Sequence[User]:
        now = self._clock()
        if now >= self._next_look:
            self._users = self._looked()
            # Of a node with thousands of processes a look takes long, and all boards share it.
            self._next_look = now + max(_LOOK_EVERY_S, (self._clock() - now) / _LOOK_SHARE)
        return self._users.get(device.pci, [])

    def _looked(self) -> dict[str, list[User]]:
        """The processes that hold memory of boards, by the boards' addresses."""
        found: dict[str, list[User]] = {}
        for pid in filter(str.isdecimal, names_in(str(self._proc))):
            # A client may have several descriptors.
            clients: dict[tuple[str, str], int] = {}
            for name in names_in(here := f"{self._proc}/{pid}/fd"):
                if not _target(f"{here}/{name}").startswith("/dev/dri/"):
                    continue
                said = files.read_text(f"{self._proc}/{pid}/fdinfo/{name}") or ""
                client, address = _CLIENT.search(said), _ADDRESS.search(said)
                if client and address:
                    held = (int(count) * _UNITS[unit] for count, unit in _MEMORY.findall(said))
                    clients[address[1], client[1]] = sum(held)
            used: dict[str, int] = {}
            for (of_board, _), held_bytes in clients.items():
                used[of_board] = used.get(of_board, 0) + held_bytes
            for of_board, used_bytes in used.items():
                if used_bytes:
                    found.setdefault(of_board, []).append(User(int(pid), used_bytes))
        return found


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
