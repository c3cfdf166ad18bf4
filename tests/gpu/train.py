"""Trains on real devices, one scenario after the other: train.py BACKEND FOLDER SCENARIOS.

All ranks may be on one GPU. Work is `torch.cuda._sleep`, which takes one of its processors alone.
Scenarios are a list in JSON: a "name", and settings for "all" ranks and for the "last" one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp


class Settings(NamedTuple):
    """What a rank does in each step."""

    forward_ms: float = 10.0
    backward_ms: float = 20.0
    load_ms: float = 0.0
    asks_every: int = 0
    hangs_at: int = 0
    """Its device never ends what is launched in backward of this step."""
    steps: int = 0
    """After so many steps it ends; 0: once the test has seen enough."""


class Busy(torch.autograd.Function):
    """Keeps the device busy in forward, and in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, net: Net) -> torch.Tensor:
        ctx.net = net
        net.work(net.settings.forward_ms)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        net = ctx.net
        net.work(1e9 if net.step == net.settings.hangs_at else net.settings.backward_ms)
        return gradient, None


class Net(nn.Module):
    def __init__(self, settings: Settings, cycles_per_ms: float) -> None:
        super().__init__()
        self.settings, self.cycles_per_ms, self.step = settings, cycles_per_ms, 0
        self.inner = nn.Linear(256, 256)

    def work(self, ms: float) -> None:
        torch.cuda._sleep(int(ms * self.cycles_per_ms))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.inner(inputs), self)


def cycles_per_ms() -> float:
    """How many cycles of `_sleep` take this device a millisecond."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    began.record()
    torch.cuda._sleep(50_000_000)
    ended.record()
    torch.cuda.synchronize()
    return 50_000_000 / began.elapsed_time(ended)


def batches(settings: Settings) -> Iterator[torch.Tensor]:
    for _ in count():
        time.sleep(settings.load_ms / 1000)
        yield torch.ones(8, 256)


def train(name: str, settings: Settings, rate: float, folder: Path) -> None:
    net = Net(settings, rate).cuda()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = otel_ddp.instrument(model, group="gpu", run=name)
    enough = torch.zeros(1, device="cuda")
    for net.step, batch in enumerate(otel_ddp.data(batches(settings)), 1):
        loss = model(batch.cuda()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if settings.asks_every and not net.step % settings.asks_every:
            loss.item()
        if settings.steps:
            if net.step == settings.steps:
                break
        elif not net.step % 100:
            # All ranks end together, and no step of those that are compared has this.
            enough.fill_(float((folder / f"{name}.enough").exists()))
            dist.all_reduce(enough)
            if enough.item():
                break
    torch.cuda.synchronize()
    run.finish()


def main(backend: str, folder: Path, scenarios: list[dict[str, Any]]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    rate = cycles_per_ms()
    dist.init_process_group(backend)
    last = dist.get_rank() == dist.get_world_size() - 1
    for each in scenarios:
        settings = Settings(**{**each.get("all", {}), **(each.get("last", {}) if last else {})})
        train(each["name"], settings, rate, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
