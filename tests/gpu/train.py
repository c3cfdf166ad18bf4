"""Trains on a device, one scenario after the other: train.py FOLDER SCENARIOS.

Scenarios are a list in JSON. Each has a "name", and settings for "all" ranks, for the "first" one
and for the "chosen" one in the middle: see `Settings`. With "begins", those of the first and of the
chosen one apply from that step on.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import device as found
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

# Ranks look after every so many steps whether they have been seen enough.
LOOKS_EVERY = 50
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
    spread: str = "ddp"
    """Or `fsdp2`, or `captured`: each rank by itself, all of its step one graph."""
    is_watched: bool = True
    """Whether otel_ddp watches it."""
    steps: int = 0
    """After so many steps it ends; 0: once the test has seen enough."""


DEVICE = found.find()


class Kernel(torch.autograd.Function):
    """Launches a kernel in backward, from the thread of autograd; inf: it never ends."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        DEVICE.busy(ctx.backward_s)
        return gradient, None


class Net(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.step = settings, 0
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.inner.to(DEVICE.name)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        if self.step == settings.stays_away_at:
            time.sleep(1e6)
        outputs = self.inner(inputs)
        # A host that is slow launches one kernel after the other, each of them late.
        pieces = 8 if settings.launch_s else 1
        for _ in range(pieces):
            time.sleep(settings.launch_s / pieces)
            DEVICE.busy(settings.forward_s / pieces)
        backward_s = float("inf") if self.step == settings.hangs_at else settings.backward_s
        return Kernel.apply(outputs, backward_s)


class Optimizer(torch.optim.SGD):
    """Keeps the device busy in its step."""

    busy_s = 0.0

    def step(self, closure: None = None) -> None:
        DEVICE.busy(self.busy_s)
        super().step(closure)


class Measured:
    """What the program itself sees of its device: the time of each phase, by events of its own."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, str, Any]] = []

    def mark(self, step: int, phase: str) -> None:
        """This phase of this step begins here."""
        event = DEVICE.module.Event(enable_timing=True)
        event.record(DEVICE.module.current_stream())
        self._marks.append((step, phase, event))

    def seconds(self, since_step: int = 1) -> dict[str, float]:
        """By phase, in all steps from this one on; the device is done with them."""
        spent: dict[str, float] = defaultdict(float)
        for (step, phase, began), (_, _, ended) in pairwise(self._marks):
            if step >= since_step:
                spent[phase] += began.elapsed_time(ended) / 1000
        return spent


def batches(net: Net) -> Iterator[torch.Tensor]:
    for _ in count():
        time.sleep(net.settings.load_s)
        yield torch.ones(8, 64, pin_memory=True)


def spread(net: Net) -> nn.Module:
    """The model, as its settings spread it over all ranks."""
    if net.settings.spread == "fsdp2":
        for layer in (net.inner[0], net.inner[2]):
            fully_shard(layer)
        return fully_shard(net)
    if net.settings.spread == "captured":
        return net
    return DistributedDataParallel(net, bucket_cap_mb=0.01)


class Step:
    """One step of a training, and what the program itself sees of it."""

    def __init__(self, net: Net) -> None:
        self.net, self.model = net, spread(net)
        self.optimizer = Optimizer(self.model.parameters(), lr=1e-6)
        self.optimizer.busy_s = net.settings.optimizer_s
        self.measured = Measured()
        self.calls = 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The loss, which the host does not wait for."""
        self.calls += 1
        self._mark("forward")
        loss = self.model(inputs).sum()
        self._mark("backward")
        loss.backward()
        self._mark("optimizer")
        self.optimizer.step()
        self._mark("between")
        self.optimizer.zero_grad()
        return loss.detach()

    def _mark(self, phase: str) -> None:
        # An event in a graph tells nothing.
        if self.net.settings.spread != "captured":
            self.measured.mark(self.net.step, phase)


def captured(step: Step, inputs: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The step as one graph, which is replayed with the same inputs."""
    graph = DEVICE.make_graph()
    with DEVICE.module.graph(graph):
        loss = step(inputs)
    # Its launches were captured: they run with each replay.
    step.calls -= 1

    def replay(_: torch.Tensor) -> torch.Tensor:
        step.calls += 1
        graph.replay()
        return loss

    return replay


def train(name: str, settings: Settings, begins: int, then: Settings, folder: Path) -> None:
    """One scenario, from its first step to its last; then what was to be seen of the device."""
    net = Net(settings)
    made = Step(net)
    step: Callable[[torch.Tensor], torch.Tensor] = made
    run = otel_ddp.instrument(made.model, group="g", run=name) if settings.is_watched else None
    optimizer, measured = made.optimizer, made.measured
    enough = torch.zeros(1, device=DEVICE.name)
    settled: dict[str, int] = {}
    for number, batch in enumerate(otel_ddp.data(batches(net)), 1):
        net.step = number
        if number == begins:
            net.settings, optimizer.busy_s = then, then.optimizer_s
        inputs = batch.to(DEVICE.name, non_blocking=True)
        if number == SETTLED:
            settled = DEVICE.waits()
            if settings.spread == "captured":
                step = captured(made, inputs)
        loss = step(inputs)
        if run is not None:
            run.log({"loss": loss}, step=number)
        if net.settings.asks_every and not number % net.settings.asks_every:
            loss.item()
        if settings.steps:
            if number == settings.steps:
                break
        elif not number % LOOKS_EVERY:
            # All ranks end together.
            enough.fill_(float((folder / f"{name}.enough").exists()))
            dist.all_reduce(enough)
            if enough.item():
                break
    waits = {why: each - settled.get(why, 0) for why, each in DEVICE.waits().items()}
    DEVICE.module.synchronize()
    said = {
        "steps": made.calls,
        "waits": {why: each for why, each in waits.items() if each},
        "seconds": measured.seconds(),
        "seconds_later": measured.seconds(since_step=3),
    }
    if run is not None:
        run.finish()
    (folder / f"{name}.{dist.get_rank()}.device").write_text(json.dumps(said))


def main(folder: Path, scenarios: list[dict[str, Any]]) -> None:
    dist.init_process_group(DEVICE.backend)
    alone = {0: "first", dist.get_world_size() // 2: "chosen"}.get(dist.get_rank(), "")
    for each in scenarios:
        every, begins = each.get("all", {}), each.get("begins", 0)
        own = Settings(**{**every, **each.get(alone, {})})
        train(each["name"], Settings(**every) if begins else own, begins, own, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
