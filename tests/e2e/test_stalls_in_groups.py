"""Four real ranks in several process groups: which one hangs, and what all of them exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

import warm
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
HOW = {
    "tensor_parallel": ("forward", "3"),
    "pipeline": ("backward", "2"),
}


# Calls and bytes of a step, by dimension and operation. A block has two layers, divided by `tensor`
# and then by `data`; four rows of eight numbers go through it, and each micro-batch is two.
OF_STEP = {
    "tensor_parallel": {
        ("data", "all_gather"): (4, 4 * 76 * 4),
        ("data", "reduce_scatter"): (2, 2 * 76 * 4),
        # Of each block forward, and of one backward.
        ("tensor", "all_reduce"): (3, 3 * 4 * 8 * 4),
    },
    "pipeline": {
        ("stage", "send"): (4, 4 * 2 * 8 * 4),
        ("stage", "recv"): (4, 4 * 2 * 8 * 4),
        ("data", "all_reduce"): (1, 2 * 72 * 4),
    },
}
Series = dict[tuple[str, str], float]


class Seen(NamedTuple):
    """What was said of one run."""

    stall: dict[str, Any]
    calls: Series
    sizes: Series


@pytest.fixture(scope="module")
def seen() -> Mapping[str, Seen]:
    """By run, what is said of its hang, and of the steps of rank 1 before it."""
    with Node(OTEL_DDP_STALL_TIMEOUT_S=str(LIMIT_S)) as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        executable, more = warm.python()
        for how, (where, odd) in HOW.items():
            for rank in "0123":
                node.start(
                    *(executable, str(script), how, where, odd, f"file://{node.root}/{how}"),
                    env={"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", **more},
                )

        def all_said() -> dict[str, dict[str, Any]] | None:
            verdicts = [each for each in node.told().verdicts if each["kind"] == "stall"]
            found = {each["who"]["run"]: each for each in verdicts if each["step"] == STEPS}
            return found if found.keys() == HOW.keys() else None

        def series(how: str, name: str) -> Series:
            found = node.series(f"training_collective_step_{name}", run=how, rank="1")
            return {(each["dimension"], each["operation"]): value for each, value in found}

        stalls = until(all_said, "the verdicts")
        return {
            how: Seen(stalls[how], *(series(how, e) for e in ("calls", "size_bytes")))
            for how in HOW
        }


@pytest.mark.parametrize("how", HOW)
def test_the_rank_that_hangs_is_named_and_none_that_waits_for_it(
    seen: Mapping[str, Seen], how: str
) -> None:
    verdict, (where, odd) = seen[how].stall, HOW[how]

    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("not_reached", [odd])
    assert (verdict["phase"], verdict["step"]) == (where, STEPS)
    assert "(may_hang)" in verdict["sentence"]


@pytest.mark.parametrize("how", HOW)
def test_each_dimension_has_its_calls_and_bytes_per_step(
    seen: Mapping[str, Seen], how: str
) -> None:
    _, calls, sizes = seen[how]

    assert {kind: (calls[kind], sizes[kind]) for kind in calls} == OF_STEP[how]
