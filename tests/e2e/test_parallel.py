"""A rank that hangs where ranks wait in several groups: it is named alone."""

from __future__ import annotations

from typing import Any

import pytest

from node import Node, until

pytestmark = pytest.mark.timed

# Two by two under tensor parallelism, and FSDP2 over both pairs; rank 3 stays away from step 20 on.
PROGRAM = """
import signal
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
import otel_ddp

steps = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs):
        if steps == 20 and dist.get_rank() == 3:
            signal.pause()
        return inputs + self.down(torch.relu(self.up(inputs)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
net = nn.Sequential(Block(), Block())
for block in net:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tensor"], plan)
    fully_shard(block, mesh=mesh["data"])
model = fully_shard(net, mesh=mesh["data"])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
otel_ddp.instrument(model, group="g", run="tp_fsdp")
while True:
    steps += 1
    model(torch.randn(8, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_of_ranks_that_wait_in_two_groups_the_one_that_hangs_is_named_alone() -> None:
    with Node(OTEL_DDP_STALL_TIMEOUT_S="2") as node:
        (script := node.root / "train.py").write_text(PROGRAM)
        node.torchrun(4, str(script))

        def stalls() -> list[dict[str, Any]]:
            found = [each for each in node.agent()["verdicts"] if each["kind"] == "stall"]
            # The ranks have been asked where they are.
            return [each for each in found if "wait for it" in each["sentence"]]

        (verdict,) = until(stalls, "the verdict")

    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("not_reached", ["3"])
    assert "ranks 0, 1, 2 wait for it" in verdict["sentence"]
