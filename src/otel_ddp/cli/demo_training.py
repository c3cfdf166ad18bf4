"""Trains a small classifier under DDP: the program that `otel-ddp demo` starts on each rank."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp
from otel_ddp.cli.demo import TROUBLE_AT

CLASSES, FEATURES, BATCH = 10, 64, 128
PAUSE_S = 0.005


class Classifier(nn.Module):  # type: ignore[misc]
    """A small classifier. It sleeps in forward and backward, to take as long as a larger model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(FEATURES, 256), nn.Linear(256, CLASSES)
        self.late_s = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        hidden = torch.relu(self.hidden(inputs))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(PAUSE_S + self.late_s))
        return self.out(hidden)


def points(generator: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around ten centres, with enough noise that learning takes a while."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(CLASSES, (size,), generator=generator)
    noise = torch.randn(size, FEATURES, generator=generator)
    return centres[labels] + 2.0 * noise, labels


def batches(
    generator: torch.Generator, fault: str, late_s: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches. With the fault `data` they come late, with `hang` they stop coming."""
    number = 0
    while True:
        if number >= TROUBLE_AT and fault == "hang":
            signal.pause()
        if number >= TROUBLE_AT and fault == "data":
            time.sleep(late_s)
        yield points(generator, BATCH)
        number += 1


def main(seconds: float, fault: str, its_rank: int, late_s: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fault = fault if rank == its_rank else ""
    torch.manual_seed(0)
    net = Classifier()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    config = {"lr": 0.005, "batch": BATCH, "optimizer": {"name": "SGD", "momentum": 0.9}}

    run = otel_ddp.instrument(model, group="demo", project="demo", config=config)

    generator = torch.Generator().manual_seed(rank)
    loss_of = nn.CrossEntropyLoss()
    ends_at = time.monotonic() + seconds
    go_on = torch.ones(1)
    for step, (inputs, labels) in enumerate(otel_ddp.data(batches(generator, fault, late_s))):
        if step == TROUBLE_AT and fault == "backward":
            net.late_s = late_s
        loss = loss_of(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if step == TROUBLE_AT and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        run.log({"loss": loss, "lr": 0.005}, step=step, epoch=step // 100)
        if step % 100 == 99:
            with run.phase("eval"), torch.no_grad():
                inputs, labels = points(generator, BATCH)
                hits = (model.module(inputs).argmax(1) == labels).float().mean()
            run.log({"accuracy": hits}, step=step, split="validation")
            if rank == 0:
                with run.phase("checkpoint"):
                    torch.save(model.module.state_dict(), io.BytesIO())
            # Rank 0's clock decides, so that all ranks stop at the same step.
            go_on[0] = float(time.monotonic() < ends_at)
            dist.broadcast(go_on, src=0)
            if not go_on.item():
                break
    run.event("done", steps=step)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    what, _, rest = sys.argv[2].removesuffix("ms").partition(":")
    whose, _, late_ms = rest.partition(":")
    main(float(sys.argv[1]), what, int(whose or 0), float(late_ms or 0) / 1000)
