"""Trains real ranks on gloo, one scenario after the other: training.py FOLDER SCENARIOS.

Scenarios are a list in JSON: a "name", and `Settings` for "all" ranks and for the "chosen" one in
the middle. Each lasts until FOLDER has a file NAME.enough.
"""

from __future__ import annotations

import gc
import json
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

STALL_S = 0.3
EVALUATES_EVERY = 30
WIDTH = 8


class Settings(NamedTuple):
    """What a rank does in each step."""

    work_s: float = 0.001
    """In forward, and the same in backward."""
    data_s: float = 0.0
    """What it needs more, as the next three."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    checkpoint_s: float = 0.0
    stalls_every: int = 0
    """Every so many batches come late; 0: none."""
    collects_every: int = 0
    """It collects garbage in every so many steps; 0: when Python does."""
    evaluates: bool = False
    """It does so in every EVALUATES_EVERY steps."""
    evaluated_s: float = 0.0
    """What it needs more in the four steps after that."""
    samples: int = 4
    buffers: bool = False
    """DDP sends them before each forward."""
    own_layer: bool = False
    """A layer waits for the other ranks by itself."""
    sharded: bool = False
    """By FSDP2 in place of DDP."""
    compiled: bool = False
    """DDP is, and not what is inside of it."""


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, settings: Settings) -> torch.Tensor:
        ctx.settings = settings
        time.sleep(settings.work_s + settings.forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.settings.work_s + ctx.settings.backward_s)
        return gradient, None


class Average(torch.autograd.Function):
    """What detectron2's synchronised batch norm does: it waits in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return _averaged(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _averaged(gradient)


def _averaged(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.only = settings, nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if settings.buffers else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = Pause.apply(self.only(self.norm(inputs)), self.settings)
        return Average.apply(output) if self.settings.own_layer else output


def model_of(settings: Settings) -> nn.Module:
    net = nn.Sequential(Block(settings), nn.Linear(WIDTH, 1))
    if settings.compiled:
        return torch.compile(DistributedDataParallel(net), backend="eager")
    if not settings.sharded:
        return DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Stop:
    """Lets all ranks end after the same step, once the test has seen enough."""

    def __init__(self, folder: Path, name: str) -> None:
        self._enough, self._at = folder / f"{name}.enough", folder / f"{name}.stops_at"

    def after(self, step: int) -> bool:
        """Whether this step was the last one."""
        # The first rank writes down the last one before all have synchronised on the one before:
        # each of them sees it in time.
        if dist.get_rank() == 0 and not self._at.exists() and self._enough.exists():
            new = self._at.with_suffix(".new")
            new.write_text(str(step + 2))
            new.rename(self._at)
        try:
            return step >= int(self._at.read_text())
        except FileNotFoundError:
            return False


def batches(settings: Settings) -> Iterator[torch.Tensor]:
    for step in count(1):
        time.sleep(settings.data_s)
        if settings.stalls_every and step % settings.stalls_every == 0:
            time.sleep(STALL_S)
        yield torch.randn(settings.samples, WIDTH)


def train(folder: Path, name: str, settings: Settings) -> None:
    model = model_of(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group="g", run=name)
    stop = Stop(folder, name)
    held = [[step] for step in range(300_000)] if settings.collects_every else []
    for step, batch in enumerate(otel_ddp.data(batches(settings)), 1):
        last = stop.after(step)
        model(batch).sum().backward()
        if settings.checkpoint_s:
            with run.phase("checkpoint"):
                time.sleep(settings.checkpoint_s)
        if settings.evaluates and step % EVALUATES_EVERY == 0:
            with run.phase("eval"):
                time.sleep(0.01)
        elif settings.evaluates and step % EVALUATES_EVERY < 5:
            time.sleep(settings.evaluated_s)
        if settings.collects_every and step % settings.collects_every == 0:
            gc.collect()
        optimizer.step()
        optimizer.zero_grad()
        if last:
            break
    del held
    run.finish()


def main(folder: Path, scenarios: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    is_chosen = dist.get_rank() == dist.get_world_size() // 2
    for each in scenarios:
        own = each.get("chosen", {}) if is_chosen else {}
        settings = Settings(**{**each.get("all", {}), **own})
        train(folder, each["name"], settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
