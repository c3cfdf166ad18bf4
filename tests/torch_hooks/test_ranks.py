"""Two ranks: what one is late by is seen in its phase, and as a wait on the other."""

from __future__ import annotations

import sys

import pytest

from conftest import Journal
from node import Node, finished

STEPS = 12
LATE_S = 0.03

TRAIN = """
import contextlib, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS, LATE_S, WORK_S = 12, 0.03, 0.02
dist.init_process_group("gloo")
rank = dist.get_rank()


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, forward_s, backward_s):
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Net(nn.Module):
    def __init__(self, late, norm):
        super().__init__()
        self.late = late
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, inputs):
        extra = lambda where: LATE_S if self.late == where else 0.0
        # Backward runs from the last line to the first.
        hidden = Pause.apply(self.first(inputs), WORK_S + extra("forward"), extra("late backward"))
        hidden = self.norm(hidden)
        return Pause.apply(self.last(hidden), 0.0, WORK_S + extra("early backward"))


def batches(late):
    for _ in range(STEPS):
        if late == "data":
            time.sleep(LATE_S)
        yield torch.randn(4, 8)


def sharded(net, **options):
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    net.no_sync = contextlib.nullcontext
    return net


def scenario(name, where, norm=False, accumulate=1, wrap=DistributedDataParallel, **options):
    late = where if rank == 1 else None
    model = wrap(Net(late, norm), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group=name)
    for number, batch in enumerate(otel_ddp.data(batches(late))):
        last = number % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            model(batch).sum().backward()
        if late == "other":
            time.sleep(LATE_S)
        if late == "checkpoint":
            with run.phase("checkpoint"):
                time.sleep(LATE_S)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    run.finish()


for where in ("data", "forward", "early backward", "late backward", "other", "checkpoint"):
    scenario(where, where)
scenario("norm", "data", norm=True)
scenario("accumulated", "data", accumulate=3)
scenario("balanced", None)
scenario("unused", "data", find_unused_parameters=True)
scenario("static", "data", static_graph=True)
scenario("sharded", "data", wrap=sharded)
dist.destroy_process_group()
"""

Totals = dict[str, float]


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, int], Totals]:
    """The totals of every scenario and rank, from one launch of two ranks."""
    with Node(OTEL_DDP_AGENT="off") as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        finished(
            node.start(
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", str(script)),
            ),
            110.0,
        )
        found = {}
        for path in node.place.journals():
            journal = Journal(path)
            key = (journal.identity["group"], journal.identity["global_rank"])
            found[key] = {
                "/".join((total.metric, *total.attributes.values())): total.values[0]
                for total in journal.all_totals
            }
        return found


def per_step(totals: Totals, phase: str) -> float:
    steps = totals["training.steps"]
    prefix = f"training.phase.time/{phase}/host"
    return sum(value for name, value in totals.items() if name.startswith(prefix)) / steps


PHASES = {
    "data": "data",
    "forward": "forward",
    "early backward": "backward",
    "late backward": "backward",
    "other": "other",
    "checkpoint": "checkpoint",
}


@pytest.mark.parametrize("where", PHASES)
def test_the_excess_is_in_its_phase_and_the_wait_on_the_other_rank(
    runs: dict[tuple[str, int], Totals], where: str
) -> None:
    early, late = runs[(where, 0)], runs[(where, 1)]
    phase = PHASES[where]

    excess = per_step(late, phase) - per_step(early, phase)
    waited = per_step(early, "comm_wait") - per_step(late, "comm_wait")

    # Of twelve steps, one begins and one ends without the other rank.
    assert excess == pytest.approx(LATE_S, rel=0.25)
    assert waited == pytest.approx(LATE_S, rel=0.25)
    assert early["training.steps"] == late["training.steps"] == STEPS


def test_with_buffers_the_wait_moves_into_forward_and_is_still_a_wait(
    runs: dict[tuple[str, int], Totals],
) -> None:
    early, late = runs[("norm", 0)], runs[("norm", 1)]
    buffers = "training.phase.time/comm_wait/host/buffers"

    assert (early[buffers] - late[buffers]) / STEPS == pytest.approx(LATE_S, rel=0.3)
    assert per_step(early, "comm_wait") - per_step(late, "comm_wait") == pytest.approx(
        LATE_S, rel=0.3
    )
    assert per_step(early, "forward") == pytest.approx(per_step(late, "forward"), rel=0.3)


def test_micro_batches_without_synchronisation_are_counted(
    runs: dict[tuple[str, int], Totals],
) -> None:
    totals = runs[("accumulated", 0)]

    assert totals["training.steps"] == STEPS / 3
    assert totals["training.micro_batches"] == STEPS
    assert totals["training.samples"] == STEPS * 4


@pytest.mark.parametrize("style", ["unused", "static"])
def test_the_ways_of_ddp_are_all_measured(runs: dict[tuple[str, int], Totals], style: str) -> None:
    early, late = runs[(style, 0)], runs[(style, 1)]

    waited = per_step(early, "comm_wait") - per_step(late, "comm_wait")
    assert waited == pytest.approx(LATE_S, rel=0.3)
    assert early["training.steps"] == STEPS


def test_a_sharded_model_trains_and_its_steps_are_counted(
    runs: dict[tuple[str, int], Totals],
) -> None:
    early, late = runs[("sharded", 0)], runs[("sharded", 1)]

    assert early["training.steps"] == late["training.steps"] == STEPS
    # Its waits are inside the blocks, in forward and backward: only the data is told apart.
    excess = per_step(late, "data") - per_step(early, "data")
    assert excess == pytest.approx(LATE_S, rel=0.3)


def test_balanced_ranks_hardly_wait(runs: dict[tuple[str, int], Totals]) -> None:
    for rank in (0, 1):
        assert per_step(runs[("balanced", rank)], "comm_wait") < LATE_S / 3
