"""Trains the same on the CPU and on the device, under DDP and FSDP2: same_losses.py FOLDER.

Each rank writes the losses of both, and how often its host waited for the device meanwhile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sim
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 200
# DDP builds its buckets anew after the first step, and its hosts wait for that.
SETTLED = 5


class Trained(NamedTuple):
    losses: torch.Tensor
    waited: dict[str, int]
    """How often the host waited in the loop, by the reason."""


def in_ddp(net: nn.Module, device: str) -> nn.Module:
    # Small buckets: several collectives in each backward.
    return DistributedDataParallel(net.to(device), bucket_cap_mb=0.01)


def sharded(net: nn.Module, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    net.to(device)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(device: str, spread: Callable[[nn.Module, str], nn.Module]) -> Trained:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Embedding(16, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))
    )
    model = spread(net, device)
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
    said = {}
    for spread in (in_ddp, sharded):
        on_cpu, on_device = train("cpu", spread), train(sim.NAME, spread)
        said[spread.__name__] = {
            "cpu": on_cpu.losses.tolist(),
            "device": on_device.losses.tolist(),
            "waited": on_device.waited,
        }
    (folder / str(dist.get_rank())).write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
