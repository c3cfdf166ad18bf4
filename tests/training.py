"""Trains real ranks on gloo, one scenario after the other: training.py FOLDER SCENARIOS.

Scenarios are a list in JSON: a "name", and `Settings` for "all" ranks and for the "chosen" one in
the middle. Each lasts until FOLDER has a file NAME.enough.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

WIDTH = 8


class Settings(NamedTuple):
    """What a rank does in each step."""

    work_s: float = 0.001
    """In forward, and the same in backward."""
    forward_s: float = 0.0
    """What it needs more, as the next one."""
    backward_s: float = 0.0


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


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.only = settings, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.only(inputs), self.settings)


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


def train(folder: Path, name: str, settings: Settings) -> None:
    model = DistributedDataParallel(nn.Sequential(Block(settings), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group="g", run=name)
    stop, step, last = Stop(folder, name), 0, False
    while not last:
        step += 1
        last = stop.after(step)
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()


def main(folder: Path, scenarios: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    is_chosen = dist.get_rank() == dist.get_world_size() // 2
    for each in scenarios:
        own = each.get("chosen", {}) if is_chosen else {}
        train(folder, each["name"], Settings(**{**each.get("all", {}), **own}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
