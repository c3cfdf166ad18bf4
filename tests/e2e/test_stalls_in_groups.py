"""Four real ranks in several process groups: which one hangs."""

from __future__ import annotations

from typing import Any

import pytest

from extras import newer_torch
from node import Node, until

# A rank that is given no core for two seconds hangs as well.
pytestmark = [pytest.mark.timed, newer_torch("flight recorder of gloo")]

LIMIT_S, STEPS = 2, 25

TRAIN = """
import os, signal, sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS, RANKS, WIDTH = 25, 4, 8
how, where, odd, init = sys.argv[1:]
rank, step = int(os.environ["RANK"]), 0
dist.init_process_group("gloo", init_method=init, rank=rank, world_size=RANKS)


def may_hang(here):
    if (rank, step, here) == (int(odd), STEPS, where):
        signal.pause()


class Hang(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        may_hang("forward")
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        may_hang("backward")
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.last(Hang.apply(self.first(Hang.apply(inputs))).relu())


def tensor_parallel():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(Block(), Block())
    for block in model:
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, lambda: model(torch.randn(4, WIDTH)).sum().backward()


def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    place = mesh["stage"].get_local_rank()
    model = DistributedDataParallel(Block(), process_group=mesh["data"].get_group())
    cpu = torch.device("cpu")
    stage = PipelineStage(model, place, 2, cpu, group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(8, WIDTH)
    return model, lambda: schedule.step(target=batch) if place else schedule.step(batch)


model, forward_and_backward = globals()[how]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = otel_ddp.instrument(model, group="g", run=how, optimizer=optimizer)
while True:
    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""
# How they train, where one of them hangs, and which.
HOW = {"tensor_parallel": ("forward", "3"), "pipeline": ("backward", "2")}


def test_the_rank_that_hangs_is_named_and_none_that_waits_for_it() -> None:
    with Node(OTEL_DDP_STALL_TIMEOUT_S=str(LIMIT_S)) as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        for how, (where, odd) in HOW.items():
            for rank in "0123":
                node.warm(
                    *(str(script), how, where, odd, f"file://{node.root}/{how}"),
                    env={"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4"},
                )

        def all_said() -> dict[str, dict[str, Any]] | None:
            verdicts = [each for each in node.told().verdicts if each["kind"] == "stall"]
            found = {each["who"]["run"]: each for each in verdicts if each["step"] == STEPS}
            return found if found.keys() == HOW.keys() else None

        stalls = until(all_said, "the verdicts")

    for how, (where, odd) in HOW.items():
        evidence = stalls[how]["evidence"]
        assert (evidence["cause"], evidence["culprits"]) == ("not_reached", [odd]), how
        assert stalls[how]["phase"] == where
        assert "(may_hang)" in stalls[how]["sentence"]
