"""Trains on the device, one scenario after the other: train.py FOLDER SCENARIOS.

Scenarios are a list in JSON. Each has a "name", and settings for "all" ranks, for the "first" one
and for the "chosen" one in the middle: see `Settings`. With "begins", those of the first and of the
chosen one apply from that step on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import sim
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

# Ranks look after every so many steps whether they have been seen enough.
LOOKS_EVERY = 50
# What begins with each mark of the program's own.
MARKED = ("forward", "backward", "optimizer", "between")
# DDP builds its buckets anew after the first step, and its hosts wait for that.
SETTLED = 10


class Settings(NamedTuple):
    """What a rank does in each step."""

    forward_s: float = 0.003
    """Of the device, as the next two."""
    backward_s: float = 0.006
    optimizer_s: float = 0.001
    load_s: float = 0.0
    """Of the host, for each batch."""
    launch_s: float = 0.0
    """Of the host, in forward."""
    asks_every: int = 0
    """Every so many steps the host asks for its loss; 0: never."""
    hangs_at: int = 0
    """Its device never ends what is launched in backward of this step."""
    stays_away_at: int = 0
    """Its host does not go on in forward of this step."""
    is_watched: bool = True
    """Whether otel_ddp watches it."""
    steps: int = 0
    """After so many steps it ends; 0: once the test has seen enough."""


class Kernel(torch.autograd.Function):
    """Launches a kernel in backward, from the thread of autograd; inf: it never ends."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.sim.busy(ctx.backward_s)
        return gradient, None


class Net(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.step = settings, 0
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        if self.step == settings.stays_away_at:
            time.sleep(1e6)
        outputs = self.inner(inputs)
        # A host that is slow launches one kernel after the other, each of them late.
        pieces = 8 if settings.launch_s else 1
        for _ in range(pieces):
            time.sleep(settings.launch_s / pieces)
            torch.sim.busy(settings.forward_s / pieces)
        backward_s = float("inf") if self.step == settings.hangs_at else settings.backward_s
        return Kernel.apply(outputs, backward_s)


class Optimizer(torch.optim.SGD):
    """Keeps the device busy in its step."""

    busy_s = 0.0

    def step(self, closure: None = None) -> None:
        torch.sim.busy(self.busy_s)
        super().step(closure)


class Measured:
    """What the program itself sees of its device: the time of each phase, by events of its own."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def mark(self) -> None:
        """A phase begins here."""
        event = torch.sim.Event(enable_timing=True)
        event.record(torch.sim.current_stream())
        self._events.append(event)

    def seconds(self, since_step: int = 1) -> dict[str, float]:
        """By phase, in all steps from this one on; the device is done with them."""
        spent = dict.fromkeys(MARKED, 0.0)
        marked = self._events[(since_step - 1) * len(MARKED) :]
        for at, (began, ended) in enumerate(pairwise(marked)):
            spent[MARKED[at % len(MARKED)]] += began.elapsed_time(ended) / 1000
        return spent


def batches(net: Net) -> Iterator[torch.Tensor]:
    for _ in count():
        time.sleep(net.settings.load_s)
        yield torch.ones(8, 64, pin_memory=True)


def train(name: str, settings: Settings, begins: int, then: Settings, folder: Path) -> None:
    """One scenario, from its first step to its last; then what was to be seen of the device."""
    device = torch.sim
    net = Net(settings).to(sim.NAME)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = Optimizer(model.parameters(), lr=1e-6)
    optimizer.busy_s = settings.optimizer_s
    run = otel_ddp.instrument(model, group="g", run=name) if settings.is_watched else None
    measured = Measured()
    enough = torch.zeros(1, device=sim.NAME)
    settled: dict[str, int] = {}
    for step, batch in enumerate(otel_ddp.data(batches(net)), 1):
        net.step = step
        if step == begins:
            net.settings, optimizer.busy_s = then, then.optimizer_s
        if step == SETTLED:
            settled = device.counts()
        inputs = batch.to(sim.NAME, non_blocking=True)
        measured.mark()
        loss = model(inputs).sum()
        measured.mark()
        loss.backward()
        measured.mark()
        optimizer.step()
        measured.mark()
        optimizer.zero_grad()
        if run is not None:
            run.log({"loss": loss.detach()})
        if net.settings.asks_every and not step % net.settings.asks_every:
            loss.item()
        if settings.steps:
            if step == settings.steps:
                break
        elif not step % LOOKS_EVERY:
            # All ranks end together.
            enough.fill_(float((folder / f"{name}.enough").exists()))
            dist.all_reduce(enough)
            if enough.item():
                break
    waits = sim.waits_since(settled)
    device.synchronize()
    said = {
        "waits": waits,
        "seconds": measured.seconds(),
        "seconds_later": measured.seconds(since_step=3),
    }
    if run is not None:
        run.finish()
    (folder / f"{name}.{dist.get_rank()}.device").write_text(json.dumps(said))


def main(folder: Path, scenarios: list[dict[str, Any]]) -> None:
    sim.install(events_keep_lock="EVENTS_KEEP_LOCK" in os.environ)
    dist.init_process_group(sim.COLLECTIVES)
    alone = {0: "first", dist.get_world_size() // 2: "chosen"}.get(dist.get_rank(), "")
    for each in scenarios:
        every, begins = each.get("all", {}), each.get("begins", 0)
        own = Settings(**{**every, **each.get(alone, {})})
        train(each["name"], Settings(**every) if begins else own, begins, own, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
