"""An asynchronous device for tests: builds it once, and lets torch know it as `torch.sim`."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from device_sim.graph_hooks import NAMES as GRAPH_HOOKS
from device_sim.graph_hooks import GraphHooks

NAME = "sim"
COLLECTIVES = "simccl"
"""The backend of its process groups."""

_NATIVE = "device_sim_native"
# What it tells. Its allocator takes the host's memory, whatever that has.
MEMORY_BYTES = 8 << 30
_SOURCE = Path(__file__).with_name("device.cpp")
_BUILDS = Path(__file__).parents[2] / "build" / "device_sim"
# Unoptimised, a launch takes several times as long.
_FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")


class NoCompiler(Exception):
    """There is nothing to build the device with."""


def library() -> Path:
    """The built device; it is built where this source, torch and compiler have not met yet."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompiler("g++ is needed to build the device of these tests")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [_SOURCE, *sorted(_SOURCE.parent.glob("*.h"))]
    told = f"{torch.__version__} {_FLAGS}".encode()
    parts = [*(each.read_bytes() for each in sources), told, version]
    folder = _BUILDS / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    built = folder / f"{_NATIVE}.so"
    folder.mkdir(parents=True, exist_ok=True)
    # Tests run side by side: one of them builds, and the others wait.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(compiler, built)
    return built


def _build(compiler: str, built: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = (torch_folder / "include", sysconfig.get_paths()["include"])
    libraries = ("c10", "torch", "torch_cpu", "torch_python")
    unfinished = built.with_suffix(".unfinished")
    command = [
        *(compiler, *_FLAGS, str(_SOURCE), "-o", str(unfinished)),
        *(f"-I{each}" for each in include),
        *(f"-L{torch_folder / 'lib'}", *(f"-l{each}" for each in libraries)),
    ]
    subprocess.run(command, check=True)
    os.replace(unfinished, built)


def install() -> ModuleType:
    """Let torch know the device, once a process: `torch.sim` is its module, which is returned."""
    loader = importlib.machinery.ExtensionFileLoader(_NATIVE, str(library()))
    spec = importlib.util.spec_from_loader(_NATIVE, loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    native.set_up(1)
    module = _module(native, _events(native))
    torch._register_device_module(NAME, module)

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        hosts = [dist.ProcessGroupGloo(store, rank, size, timeout)]
        return native.collectives(hosts, COLLECTIVES)

    dist.Backend.register_backend(COLLECTIVES, create, devices=[NAME])
    # A kernel that runs while the process ends would run on what is no longer there. One that never
    # ends runs on nothing.
    atexit.register(native.quiet, 1.0)
    return module


def waits_since(before: dict[str, int]) -> dict[str, int]:
    """How often hosts have waited for the device since these counts, by the reason.

    A launch that waits for a place in the queue is none of these: no program asks for that.
    """
    now = getattr(torch, NAME).counts()
    since = {why: number - before.get(why, 0) for why, number in now.items()}
    return {why: number for why, number in since.items() if number and why != "queue_full"}


def _events(native: ModuleType) -> type[torch.Event]:
    class Event(torch.Event):
        """Without a time unless asked for one. Other threads run while it waits for a place."""

        def __new__(cls, enable_timing: bool = False) -> Event:
            return super().__new__(cls, NAME, enable_timing=enable_timing)

        def elapsed_time(self, end: Event) -> float:
            return float(native.elapsed_ms(self, end))

        def record(self, stream: torch.Stream | None = None) -> None:
            native.record(self, stream or torch.accelerator.current_stream())

        def wait(self, stream: torch.Stream | None = None) -> None:
            native.wait(self, stream or torch.accelerator.current_stream())

    return Event


def _streams(event: type[torch.Event]) -> type[torch.Stream]:
    class Stream(torch.Stream):
        """As torch.cuda.Stream: it waits by an event's own method."""

        def wait_event(self, event: torch.Event) -> None:
            event.wait(self)

        def wait_stream(self, other: torch.Stream) -> None:
            self.wait_event(other.record_event())

        def record_event(self, given: torch.Event | None = None) -> torch.Event:
            made = given or event()
            made.record(self)
            return made

    return Stream


class _Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, native: ModuleType, hooks: GraphHooks) -> None:
        self.native, self.hooks = native.Graph(), hooks

    def replay(self) -> None:
        self.hooks.run("replay_start", self)
        try:
            self.native.replay()
        finally:
            self.hooks.run("replay_end", self)


@contextmanager
def _graph(native: ModuleType, graph: _Graph) -> Iterator[None]:
    """As torch.cuda.graph: what is launched within is captured, and runs with each replay."""
    getattr(torch, NAME).synchronize()
    graph.native.capture()
    graph.hooks.run("capture_start", graph)
    try:
        yield
    finally:
        native.end_capture()
        graph.hooks.run("capture_end", graph)


def _module(native: ModuleType, event: type[torch.Event]) -> ModuleType:
    """What `torch.cuda` offers, under the same names."""
    module = ModuleType(f"torch.{NAME}")
    hooks = GraphHooks()
    for name in GRAPH_HOOKS:
        setattr(torch.cuda.graphs, f"register_graph_{name}_hook", partial(hooks.register, name))
    torch.cuda.is_current_stream_capturing = native.is_capturing
    accelerator = torch.accelerator
    stream_class = _streams(event)

    def current_stream(device: Any = None) -> torch.Stream:
        found = accelerator.current_stream(device)
        return stream_class(
            stream_id=found.stream_id,
            device_index=found.device_index,
            device_type=found.device_type,
        )

    found = {
        "Event": event,
        "Graph": partial(_Graph, native, hooks),
        "Stream": stream_class,
        "busy": native.busy,
        "counts": native.counts,
        "current_device": accelerator.current_device_index,
        "current_stream": current_stream,
        "device": lambda device: accelerator.device_index(torch.device(device).index or 0),
        "device_count": lambda: 1,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=MEMORY_BYTES),
        "graph": partial(_graph, native),
        "is_available": lambda: True,
        "is_current_stream_capturing": native.is_capturing,
        "is_initialized": lambda: True,
        "memory_stats": accelerator.memory_stats,
        "manual_seed_all": lambda seed: None,
        "set_device": accelerator.set_device_index,
        "stream": lambda stream: stream,
        "synchronize": accelerator.synchronize,
        "_is_in_bad_fork": lambda: False,
    }
    vars(module).update(found)
    return module
