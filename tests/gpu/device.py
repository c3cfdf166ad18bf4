"""The device of a test program: one that torch knows, or the one of tests/device_sim."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Which one: a type that torch knows; without it the one of the tests.
VARIABLE = "TEST_DEVICE"


class Device(NamedTuple):
    """What a program needs of it."""

    name: str
    module: Any
    backend: str
    busy: Callable[[float], None]
    """Launch a kernel that does nothing for so many seconds; inf: it never ends."""
    make_graph: Callable[[], Any]
    waits: Callable[[], dict[str, int]]
    """How often hosts have waited for it, by the reason; empty where it does not count."""


def find() -> Device:
    """The device of this process."""
    name = os.environ.get(VARIABLE, "")
    return _real(name) if name else _sim()


def _sim() -> Device:
    sys.path.append(str(Path(__file__).parents[1]))
    sim = importlib.import_module("device_sim.sim")
    module = sim.install()
    waits = partial(sim.waits_since, {})
    return Device(sim.NAME, module, sim.COLLECTIVES, module.busy, module.Graph, waits)


def _real(name: str) -> Device:
    module = torch.get_device_module(name)
    module.set_device(int(os.environ["LOCAL_RANK"]) % module.device_count())
    backend = dist.get_default_backend_for_device(name)
    launch = _sleeps if name == "cuda" else _multiplies
    make_graph = getattr(module, "CUDAGraph", None) or getattr(module, f"{name.upper()}Graph", None)
    return Device(name, module, backend, launch(name, module), make_graph, dict)


def _sleeps(name: str, module: Any) -> Callable[[float], None]:
    """A kernel that takes one of its processors alone, and no memory."""
    per_second = _rate(module, 50_000_000, module._sleep)

    def busy(seconds: float) -> None:
        # A day is for ever.
        module._sleep(int(min(seconds, 86_400.0) * per_second))

    return busy


def _multiplies(name: str, module: Any) -> Callable[[float], None]:
    """Many kernels: none takes a given time on all devices. So none is endless either."""
    square = torch.ones(512, 512, device=name)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(square, square)

    per_second = _rate(module, 200, multiply)
    return lambda seconds: multiply(max(round(seconds * per_second), 1))


def _rate(module: Any, amount: int, launch: Callable[[int], Any]) -> float:
    """How much of this takes the device a second."""
    began, ended = (module.Event(enable_timing=True) for _ in range(2))
    launch(amount // 50)
    began.record()
    launch(amount)
    ended.record()
    module.synchronize()
    return amount / float(began.elapsed_time(ended)) * 1000
