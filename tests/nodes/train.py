"""Trains a small model under DDP, and makes the trouble that FOLDER names: train.py FOLDER.

A step takes 60 ms. A file `trouble-RANK` says what is wrong with that rank from its next step on:
"backward 0.02" (seconds more) or "hang". With `--by-node` the ranks of each node train without
those of the others. It ends after the step that a file `run.stops_at` names.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp
from training import WIDTH, Block, Stop

WORK_S, DATA_S = 0.025, 0.01


class Trouble:
    """What is wrong with this rank; the model's layer asks for `work_s` and the next two."""

    work_s, forward_s, backward_s = WORK_S, 0.0, 0.0

    def __init__(self, file: Path) -> None:
        self._file = file

    def look(self) -> None:
        """What the file says at the beginning of a step."""
        what, _, seconds = (self._file.read_text() if self._file.exists() else "").partition(" ")
        self.backward_s = float(seconds or 0)
        if what == "hang":
            signal.pause()


def batches(trouble: Trouble) -> Iterator[torch.Tensor]:
    while True:
        trouble.look()
        time.sleep(DATA_S)
        yield torch.randn(4, WIDTH)


def ranks_of_this_node() -> dist.ProcessGroup:
    here, each = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    groups = [
        dist.new_group(list(range(first, first + each)))
        for first in range(0, dist.get_world_size(), each)
    ]
    return groups[here]


def main(said: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    trouble = Trouble(said.folder / f"trouble-{dist.get_rank()}")
    net = nn.Sequential(Block(trouble), nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(
        net, process_group=ranks_of_this_node() if said.by_node else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, strategy="all")
    stop = Stop(said.folder, "run")
    for step, batch in enumerate(otel_ddp.data(batches(trouble)), 1):
        last = stop.after(step)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log({"samples": step * len(batch)}, step=step)
        if last:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--by-node", action="store_true")
    main(options.parse_args())
