"""Tries the device out: behaves.py FOLDER. It writes what it saw, by the name of the trial."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sim
import torch

MS = 0.001


def waits(act: Callable[[], Any]) -> dict[str, int]:
    before = torch.sim.counts()
    act()
    return sim.waits_since(before)


def took_s(act: Callable[[], Any]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def runs_behind() -> dict[str, Any]:
    on_device = torch.ones(4, device=sim.NAME)
    passed = torch.sim.Event()
    torch.sim.busy(300 * MS)
    launched_s = took_s(lambda: on_device.add_(1))
    passed.record()
    was_passed = passed.query()
    return {"launched_s": launched_s, "passed": was_passed, "sum": on_device.sum().item()}


def full_queue() -> dict[str, float]:
    def launch(kernels: int) -> float:
        return took_s(lambda: [torch.sim.busy(0) for _ in range(kernels)])

    torch.sim.synchronize()
    torch.sim.busy(500 * MS)
    return {"most_s": launch(1023), "one_more_s": launch(1)}


def several_streams() -> dict[str, float]:
    torch.sim.synchronize()
    other = torch.sim.Stream(sim.NAME)
    first, second, third = (torch.sim.Event(enable_timing=True) for _ in range(3))

    def both() -> None:
        torch.sim.busy(200 * MS)
        first.record()
        with torch.sim.stream(other):
            torch.sim.busy(200 * MS)
            second.record()
            other.wait_event(first)
            torch.sim.busy(100 * MS)
            third.record()
        torch.sim.synchronize()

    return {"both_s": took_s(both), "after_first_ms": first.elapsed_time(third)}


def timed() -> float:
    began, ended = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    began.record()
    torch.sim.busy(50 * MS)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def reasons() -> dict[str, dict[str, int]]:
    pinned = torch.ones(4, pin_memory=True)
    on_device = pinned.to(sim.NAME)
    return {
        "launch": waits(lambda: (on_device * 2).sum()),
        "item": waits(lambda: on_device.sum().item()),
        "to the device": waits(lambda: pinned.to(sim.NAME, non_blocking=True)),
        "page-locked": waits(lambda: pinned.copy_(on_device, non_blocking=True)),
        "pageable": waits(lambda: torch.ones(4).copy_(on_device, non_blocking=True)),
        "sizes by data": waits(on_device.nonzero),
        "stream": waits(torch.sim.current_stream().synchronize),
    }


def memory() -> list[int]:
    torch.sim.synchronize()
    before = torch.accelerator.memory_allocated()
    held = torch.ones(1000, device=sim.NAME)
    while_held = torch.accelerator.memory_allocated() - before
    torch.sim.busy(50 * MS)
    held.add_(1)
    # A kernel that is launched on it keeps it.
    del held
    launched = torch.accelerator.memory_allocated() - before
    torch.sim.synchronize()
    return [while_held, launched, torch.accelerator.memory_allocated() - before]


def overtaken() -> list[float]:
    """What a copy carries that its host has overwritten since: page-locked memory, and other."""
    found = []
    for source in (torch.ones(1, pin_memory=True), torch.ones(1)):
        torch.sim.busy(50 * MS)
        copied = source.to(sim.NAME, non_blocking=True)
        source.fill_(2)
        found.append(copied.item())
    return found


def two_devices() -> dict[str, Any]:
    """While one is busy, the other one works; a copy waits for both."""
    torch.sim.synchronize()
    busy, other = torch.ones(2, device=f"{sim.NAME}:0"), torch.ones(2, device=f"{sim.NAME}:1")
    torch.sim.busy(300 * MS)
    busy.add_(1)
    alone_s = took_s(lambda: other.add_(1).sum().item())
    return {
        "alone_s": alone_s,
        "copied": busy.to(other.device).add_(other).tolist(),
        "bytes": [torch.accelerator.memory_allocated(device) for device in (0, 1)],
    }


def captured() -> dict[str, Any]:
    """What is captured runs with each replay, and not before; an event is not to be recorded."""
    value, graph = torch.zeros(1, device=sim.NAME), torch.sim.Graph()
    said = ""
    with torch.sim.graph(graph):
        value.add_(1)
        try:
            torch.sim.Event().record()
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
    found = [value.item()]
    for _ in range(2):
        graph.replay()
        found.append(value.item())
    return {"values": found, "event": said}


def failed() -> str:
    weights = torch.ones(2, 2, device=sim.NAME)
    torch.nn.functional.embedding(torch.tensor([7]).to(sim.NAME), weights)
    try:
        torch.sim.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    sim.install(devices=2)
    trials = (
        *(runs_behind, full_queue, several_streams, timed, reasons, memory, overtaken),
        *(two_devices, captured),
        # A device that has failed stays so.
        failed,
    )
    (folder / "seen").write_text(json.dumps({each.__name__: each() for each in trials}))
    torch.sim.busy(float("inf"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
