"""Trains four ranks in other ways than by DDP alone, one by one: parallel.py FOLDER SCENARIOS.

A scenario has the "name" of a function below, and lasts until FOLDER has a file NAME.enough. All
ranks are balanced, as far as they do the same: the last stage of a pipeline has the loss, and
experts get unequal numbers of tokens. With "hangs", rank 3 goes no further than this step.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import otel_ddp
from training import Stop

WIDTH, BATCH = 8, 8
Step = Callable[[], None]
hangs = False


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if hangs and dist.get_rank() == 3:
            signal.pause()
        return inputs + self.down(torch.relu(self.up(inputs)))


def pipeline(stages: int) -> tuple[nn.Module, Step]:
    """1F1B, with DDP where a stage has copies: torch's own of one rank fails at the second step."""
    mesh = init_device_mesh("cpu", (4 // stages, stages), mesh_dim_names=("data", "stage"))
    at = mesh.get_local_rank("stage")
    # A head and its loss: nothing that another stage could be compared with.
    net = nn.Sequential(Block(), *(Block(4096) for _ in range(2 * (at == stages - 1))))
    model: nn.Module = net
    if stages < 4:
        model = DistributedDataParallel(net, process_group=mesh.get_group("data"))
    stage = PipelineStage(model, at, stages, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    given = (torch.randn(BATCH, WIDTH),) if at == 0 else ()
    wanted = {"target": torch.randn(BATCH, WIDTH)} if at == stages - 1 else {}
    return model, lambda: schedule.step(*given, **wanted)


def tp_fsdp() -> tuple[nn.Module, Step]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(Block(), Block())
    for block in net:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    model = fully_shard(net, mesh=mesh["data"])
    return model, lambda: model(torch.randn(BATCH, WIDTH)).mean().backward()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        ctx.back = got, sent
        return exchanged(value, sent, got)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return exchanged(gradient, *ctx.back), None, None


def exchanged(value: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
    output = value.new_empty(sum(got), WIDTH)
    dist.all_to_all_single(output, value.contiguous(), got, sent)
    return output


class Experts(nn.Module):
    """Each rank has one, and the last gets four times as many tokens as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, WIDTH), Block(512)
        self.tokens = [64, 128, 192, 256]
        own = [f"expert.{name}" for name, _ in self.expert.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, own)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mine = [self.tokens[dist.get_rank()]] * 4
        routed = Exchange.apply(self.router(inputs), self.tokens, mine)
        return Exchange.apply(self.expert(routed), mine, self.tokens)


def experts() -> tuple[nn.Module, Step]:
    model = DistributedDataParallel(Experts())
    tokens = torch.randn(sum(model.module.tokens), WIDTH)
    return model, lambda: model(tokens).mean().backward()


WAYS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "pipeline of 2": lambda: pipeline(2),
    "pipeline of 4": lambda: pipeline(4),
    "tp_fsdp": tp_fsdp,
    "experts": experts,
}


def main(folder: Path, scenarios: list[dict[str, Any]]) -> None:
    global hangs
    dist.init_process_group("gloo")
    for each in scenarios:
        model, step = WAYS[each["name"]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        run = otel_ddp.instrument(model, group="g", run=each["name"])
        stop = Stop(folder, each["name"])
        number, last = 0, False
        while not last:
            number += 1
            last = stop.after(number)
            hangs = number == each.get("hangs")
            step()
            optimizer.step()
            optimizer.zero_grad()
        run.finish()
        # The first rank of a pipeline would begin the next one while the last is in this.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
