"""Trains the same under DDP on the CPU and on the device: same_losses.py FOLDER.

Each rank writes the losses of both, and how often its host waited for the device meanwhile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import sim
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 200
# DDP builds its buckets anew after the first step, and its hosts wait for that.
SETTLED = 5


class Trained(NamedTuple):
    losses: torch.Tensor
    waited: dict[str, int]
    """How often the host waited in the loop, by the reason."""


def train(device: str) -> Trained:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Embedding(16, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))
    )
    # Small buckets: several collectives in each backward.
    model = DistributedDataParallel(net.to(device), bucket_cap_mb=0.01)
    # Its other way to compute rounds otherwise.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(STEPS):
        if step == SETTLED:
            before = torch.sim.counts()
        tokens = torch.randint(0, 16, (8, 12), pin_memory=True).to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten() % 16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    waited = sim.waits_since(before)
    return Trained(torch.stack(losses).cpu(), waited)


def main(folder: Path) -> None:
    sim.install()
    dist.init_process_group(f"cpu:gloo,{sim.NAME}:{sim.COLLECTIVES}")
    on_cpu, on_device = train("cpu"), train(sim.NAME)
    said = {
        "cpu": on_cpu.losses.tolist(),
        "device": on_device.losses.tolist(),
        "waited": on_device.waited,
    }
    (folder / str(dist.get_rank())).write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
