"""Trains a small model under DDP, and makes the trouble that FOLDER names: training.py FOLDER.

A step takes 60 ms. A file `trouble-RANK` says what is wrong with that rank from its next step on:
"backward 0.02" (seconds more) or "hang". With `--by-node` the ranks of each node train without
those of the others. It ends after the step that a file `stops_at` names.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

WIDTH, BATCH, DATA_S = 8, 4, 0.01


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        time.sleep(block.work_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.block.work_s + ctx.block.late_s)
        return gradient, None


class Block(nn.Module):
    """Works as long in forward as in backward, where it may need more."""

    late_s = 0.0

    def __init__(self, work_s: float = 0.025) -> None:
        super().__init__()
        self.work_s, self.only = work_s, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.only(inputs), self)


def said(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def batches(folder: Path, block: Block) -> Iterator[torch.Tensor]:
    while True:
        what, _, seconds = said(folder / f"trouble-{dist.get_rank()}").partition(" ")
        block.late_s = float(seconds or 0)
        if what == "hang":
            signal.pause()
        time.sleep(DATA_S)
        yield torch.randn(BATCH, WIDTH)


def ranks_of_this_node() -> dist.ProcessGroup:
    here, each = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    groups = [
        dist.new_group(list(range(first, first + each)))
        for first in range(0, dist.get_world_size(), each)
    ]
    return groups[here]


def main(folder: Path, *options: str) -> None:
    dist.init_process_group("gloo")
    block = Block()
    model = DistributedDataParallel(
        nn.Sequential(block, nn.Linear(WIDTH, 1)),
        process_group=ranks_of_this_node() if "--by-node" in options else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, strategy="all")
    for step, batch in enumerate(otel_ddp.data(batches(folder, block)), 1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log({"samples": step * len(batch)}, step=step)
        if step >= float(said(folder / "stops_at") or "inf"):
            break
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
