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


def main(folder: Path) -> None:
    sim.install()
    trials = (runs_behind, full_queue, reasons)
    (folder / "seen").write_text(json.dumps({each.__name__: each() for each in trials}))
    torch.sim.busy(float("inf"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
