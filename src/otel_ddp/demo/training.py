"""Trains a small classifier under DDP for a while: what `otel-ddp demo` starts on each rank."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

CLASSES, FEATURES, BATCH = 10, 64, 128


def batches(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around ten centres, with enough noise that learning takes a while."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, FEATURES, generator=generator)
    return centres[labels] + 2.0 * noise, labels


def main(seconds: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    config = {"lr": 0.005, "batch": BATCH, "optimizer": {"name": "SGD", "momentum": 0.9}}

    run = otel_ddp.instrument(model, group="demo", project="demo", config=config)

    generator = torch.Generator().manual_seed(rank)
    loss_of = nn.CrossEntropyLoss()
    ends_at = time.monotonic() + seconds
    go_on = torch.ones(1)
    step = 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            inputs, labels = batches(generator)
            loss = loss_of(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss, "lr": 0.005}, step=step, epoch=step // 100)
            step += 1
            if step % 100 == 0:
                with run.phase("eval"), torch.no_grad():
                    inputs, labels = batches(generator)
                    hits = (model.module(inputs).argmax(1) == labels).float().mean()
                run.log({"accuracy": hits}, step=step, split="validation")
                if rank == 0:
                    with run.phase("checkpoint"):
                        torch.save(model.module.state_dict(), Path(folder) / "model.pt")
                # All ranks stop at the same step: the clock of one of them decides.
                go_on[0] = float(time.monotonic() < ends_at)
                dist.broadcast(go_on, src=0)
                if not go_on.item():
                    break
            time.sleep(0.01)
    run.event("done", steps=step)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else float(os.environ.get("DEMO_SECONDS", "20")))
