"""Trains on the stand-in for a device, one scenario after the other: train.py FOLDER SCENARIOS.

Scenarios are a list in JSON. Each has a "name", and settings for "all" ranks, for the "first" one,
and for the "chosen" one in the middle: see `Settings`. With "begins", the settings of the first and
of the chosen one apply from that step on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from device import LAUNCH_QUEUE, NAME, Device, exchange, install, move
from nccl import init_process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

_LAYERS, _FIRST_LOADS = 2, 5
# By then a host is ahead that can be.
_SETTLED = 30


@dataclass
class Settings:
    """What a rank does in each step."""

    forward_s: float = 0.004
    """Of the device, as the next two."""
    backward_s: float = 0.008
    optimizer_s: float = 0.002
    transfer_s: float = 0.0005
    """Of each all-reduce; there is one for each of two layers."""
    kernels: int = 100
    """How many a step launches: the launch queue holds 1,024, so this is a lead of ten steps."""
    load_s: float = 0.0
    """Of the host, for each batch."""
    first_load_s: float = 0.0
    """The same, for each of the first five: until the agent has seen a step of each rank."""
    launch_s: float = 0.0
    """Of the host, for all of forward."""
    work_s: float = 0.0
    """Of the host, between steps."""
    asks_every: int = 0
    """Every so many steps the host waits for its loss; 0: never."""
    jitter: float = 0.0
    """By what share of its time each piece of work of the device varies."""
    gathers: bool = False
    """No DDP: a layer gathers its weights before it works; gradients are scattered at the end."""
    hangs_in: int = 0
    """In backward of this step, a piece of work of the device does not end; 0: in none."""
    has_clock: bool = True
    """Whether this device has events that can be asked."""
    steps: int = 0
    """After so many steps it ends; 0: once the test has seen enough."""


class Kernels(torch.autograd.Function):
    """Queues what a layer takes on the device; the host does not wait for it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        layer.device.compute.part = "forward"
        settings = layer.settings
        layer.gather()
        pieces = 4 if settings.launch_s else 1
        for _ in range(pieces):
            time.sleep(settings.launch_s / _LAYERS / pieces)
            layer.launch(settings.forward_s / pieces, settings.kernels // 4 // pieces)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: Layer = ctx.layer
        layer.device.compute.part = "backward"
        layer.gather()
        layer.hang()
        layer.launch(layer.settings.backward_s, layer.settings.kernels // 2)
        layer.scatter()
        return gradient, None


class Layer(nn.Module):
    """One of two: it takes half of the model's time."""

    def __init__(self, device: Device, settings: Settings, *, is_first: bool) -> None:
        super().__init__()
        self.device, self.settings, self.is_first = device, settings, is_first
        self.weights = nn.Linear(8, 8, bias=False)
        self.steps = 0
        # Each rank, and each of its layers, has its own.
        self._random = Random(f"{dist.get_rank()} {is_first}")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return Kernels.apply(self.weights(inputs), self)

    def launch(self, seconds: float, kernels: int) -> None:
        share = self._random.lognormvariate(0, self.settings.jitter) / _LAYERS
        self.device.compute.launch(seconds * share, max(1, kernels // _LAYERS))

    def gather(self) -> None:
        if self.settings.gathers:
            self.device.compute.wait_event(self.device.collective("_all_gather_base", [[32]]))

    def scatter(self) -> None:
        if self.settings.gathers and self.is_first:
            done = self.device.collective("_reduce_scatter_base", [[128]])
            self.device.wait_after_backward(done)

    def hang(self) -> None:
        if self.is_first and self.steps == self.settings.hangs_in:
            self.device.compute.queue(_never)


def _never(began_s: float) -> None:
    """When the work is done that does not end."""


class Optimizer(torch.optim.SGD):
    """Queues its step."""

    device: Device
    settings: Settings

    def step(self, closure: None = None) -> None:
        self.device.compute.part = "optimizer"
        self.device.compute.launch(self.settings.optimizer_s, self.settings.kernels // 4)
        super().step(closure)


class Stop:
    """Lets all ranks end after the same step, once the test has seen enough."""

    def __init__(self, folder: Path, name: str, settings: Settings) -> None:
        self._enough, self._at = folder / f"{name}.enough", folder / f"{name}.stops_at"
        self._steps = settings.steps
        # No host is further ahead of its device, and devices are at most a step apart.
        self._ahead = LAUNCH_QUEUE // settings.kernels + 3

    def after(self, step: int, leads: bool) -> bool:
        """Whether this step was the last one."""
        if self._steps:
            return step == self._steps
        if leads and not self._at.exists() and self._enough.exists():
            new = self._at.with_suffix(".new")
            new.write_text(str(step + self._ahead))
            new.rename(self._at)
        try:
            return step >= int(self._at.read_text())
        except FileNotFoundError:
            return False


def train(
    device: Device,
    folder: Path,
    name: str,
    settings: Settings,
    begins: int,
    then: Mapping[str, Any],
) -> None:
    """One scenario, from its first step to its last; then what the device did beside its work."""
    stop = Stop(folder, name, settings)
    device.compute.idle_s.clear()
    since = Since(device)
    lead_s = 0.0
    setattr(torch, NAME, device if settings.has_clock else SimpleNamespace())
    device.transfer_s = settings.transfer_s
    net = nn.Sequential(*(Layer(device, settings, is_first=not at) for at in range(_LAYERS)))
    move(net)
    model = net if settings.gathers else _in_ddp(net, device)
    optimizer = Optimizer(model.parameters(), lr=1e-6)
    optimizer.device, optimizer.settings = device, settings
    run = otel_ddp.instrument(model, group="g", run=name)
    for step, batch in enumerate(otel_ddp.data(_batches(settings)), 1):
        if step == begins:
            vars(settings).update(then)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        lead_s = max(lead_s, device.compute.left_s)
        if step == _SETTLED:
            since = Since(device)
        if settings.asks_every and not step % settings.asks_every:
            device.compute.synchronize()
        time.sleep(settings.work_s)
        if stop.after(step, dist.get_rank() == 0):
            break
    device.compute.synchronize()
    own = {"idle_s": device.compute.idle_s, "lead_s": lead_s, "disturbed_s": since.disturbed_s()}
    (folder / f"{name}.{dist.get_rank()}.device").write_text(json.dumps(own))
    run.finish()


class Since:
    """What kept a device from its work from now on: a host or a thread that had no core."""

    def __init__(self, device: Device) -> None:
        self._device, self._before_s = device, self._all_s(device)

    def disturbed_s(self) -> float:
        return self._all_s(self._device) - self._before_s

    @staticmethod
    def _all_s(device: Device) -> float:
        return device.compute.idle_s.total() + device.heard_late_s


def _in_ddp(net: nn.Module, device: Device) -> nn.Module:
    # One bucket for each layer: the first is on its way while backward goes on.
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    model.register_comm_hook(device, exchange)
    return model


def _batches(settings: Settings) -> Iterator[torch.Tensor]:
    for number in count():
        time.sleep(settings.first_load_s if number < _FIRST_LOADS else settings.load_s)
        yield torch.ones(4, 8)


def main(folder: Path, scenarios: list[dict[str, Any]]) -> None:
    # The thread that meets other devices is no part of this host: it gives way soon.
    sys.setswitchinterval(0.0001)
    device = install()
    init_process_group(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for each in scenarios:
        alone = {0: "first", world_size // 2: "chosen"}.get(rank, "")
        settings, own = Settings(**each.get("all", {})), each.get(alone, {})
        begins = each.get("begins", 0)
        if not begins:
            vars(settings).update(own)
        train(device, folder, each["name"], settings, begins, own)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
