"""A late rank under FSDP2, where waits lie inside forward and backward: real ranks, real agent."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from node import Labels, Node, finished, until, without_figures
from otlp_receiver import Receiver

pytest.importorskip("torch.distributed.fsdp", reason="FSDP2 came with PyTorch 2.6")

LATE_RANK = "1"
# A short ring is soon written down, so ranks may be asked every few seconds.
RING = "200"

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import otel_ddp

folder, launcher = sys.argv[1], os.getppid()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


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


class Block(nn.Module):
    def __init__(self, late_s):
        super().__init__()
        self.only, self.late_s = nn.Linear(8, 8), late_s

    def forward(self, inputs):
        return Pause.apply(self.only(inputs), 0.01 + self.late_s, 0.01)


def is_enough(name):
    # All leave together: the first rank has seen that the test wants it, and says so.
    enough = torch.tensor(float(os.path.exists(f"{folder}/{name}.enough")))
    dist.broadcast(enough, src=0)
    return bool(enough)


for name in ("balanced", "late"):
    late_s = 0.03 if name == "late" and rank == 1 else 0.0
    model = nn.Sequential(Block(late_s), nn.Linear(8, 1))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group="g", run=name)
    step = 0
    # Whose launcher was killed ends as well.
    while os.getppid() == launcher and (step % 20 or not is_enough(name)):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    run.finish()
dist.destroy_process_group()
"""


class Seen(NamedTuple):
    """What a user may look at, in the moment in which the test had seen enough."""

    verdicts: list[dict[str, Any]]
    straggler: list[tuple[Labels, float]]
    excess: list[tuple[Labels, float]]
    first: str
    """What was said while there was nothing to say."""


class Launch:
    """Both trainings on both ranks, one after the other."""

    def __init__(self) -> None:
        with Node(TORCH_FR_BUFFER_SIZE=RING) as node, Receiver() as receiver:
            node.export_to(receiver.start_http())
            script = node.root / "train.py"
            script.write_text(TRAIN)
            process = node.torchrun(2, str(script), str(node.root))
            until(node.place.agent_file.exists, "torch to be imported")
            self.balanced = self._see(node, "balanced")
            self.late = self._see(node, "late")
            finished(process)
            node.stop_agent()
            self.records = [
                (each, {pair.key: pair.value.string_value for pair in each.attributes})
                for each in receiver.logs()
            ]

    def _see(self, node: Node, run: str) -> Seen:
        def insufficient() -> str:
            return node.insufficient(run)

        # Without a word on what is missing there is something to say: a name, or that all is well.
        first = until(insufficient, f"{run} to begin")
        until(
            lambda: not insufficient() and node.series("training_straggler", run=run, phase=""),
            f"enough samples of {run}",
        )
        seen = Seen(
            [each for each in node.agent()["verdicts"] if each["who"]["run"] == run],
            node.series("training_straggler", run=run),
            node.series("training_straggler_excess_ratio", run=run, phase="all"),
            first,
        )
        (node.root / f"{run}.enough").touch()
        return seen


@pytest.fixture(scope="module")
def launch() -> Launch:
    return Launch()


def speed(verdicts: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [
        (each["kind"], each["who"]["rank"], each["phase"])
        for each in verdicts
        if each["kind"] in ("straggler", "imbalance")
    ]


def test_a_rank_that_is_late_in_forward_is_named_by_its_arrivals(launch: Launch) -> None:
    seen = launch.late
    assert speed(seen.verdicts) == [("straggler", LATE_RANK, "forward")]
    (verdict,) = [each for each in seen.verdicts if each["kind"] == "straggler"]
    assert verdict["evidence"]["told_by"] == "arrivals at collectives"
    named = [(labels["rank"], labels["phase"]) for labels, value in seen.straggler if value]
    assert named == [(LATE_RANK, "forward")]
    excess = {labels["rank"]: value for labels, value in seen.excess}
    # 30 ms of some 60.
    assert excess[LATE_RANK] > 0.2 > excess["0"]

    told = [
        (record.severity_text, without_figures(record.body.string_value))
        for record, said in launch.records
        if (said.get("run"), said.get("verdict"), said.get("verdict.state"))
        == ("late", "straggler", "opened")
    ]
    assert told == [("WARN", without_figures(verdict["sentence"]))]


def test_of_balanced_ranks_nobody_is_named(launch: Launch) -> None:
    seen = launch.balanced
    assert speed(seen.verdicts) == []
    assert {(labels["rank"], value) for labels, value in seen.straggler} == {("0", 0.0), ("1", 0.0)}
    told = [said for _, said in launch.records if said.get("run") == "balanced"]
    assert not [each for each in told if each.get("verdict") in ("straggler", "imbalance")]


def test_until_ranks_have_been_asked_it_is_said_what_is_missing(launch: Launch) -> None:
    for seen in (launch.balanced, launch.late):
        assert seen.first.startswith("insufficient data: ")
