"""Two ranks with steps of some milliseconds, by the settings of who sets none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from node import Node, finished, until

# A late rank is named, and none but it.
pytestmark = pytest.mark.timed

TRAIN = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import otel_ddp

dist.init_process_group("gloo")
torch.set_num_threads(1)


class Net(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.004 + 0.004 * dist.get_rank())
        return super().forward(batch)


net = torch.nn.parallel.DistributedDataParallel(Net(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
run = otel_ddp.init(run="short")
otel_ddp.instrument(net, strategy="all")
until, batch = Path(sys.argv[1]), torch.randn(16, 64)
steps, stop = 0, torch.zeros(1)
while not stop.item():
    loss = net(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
    if steps % 50 == 0:
        stop.fill_(until.exists())
        dist.all_reduce(stop)
if dist.get_rank() == 0:
    print("steps", steps, flush=True)
dist.destroy_process_group()
"""


def late_ranks(node: Node) -> set[tuple[str, str]]:
    found = node.series("training_straggler")
    return {(each["rank"], each["phase"]) for each, value in found if value}


def test_a_late_rank_of_short_steps_is_named_and_each_step_counted(tmp_path: Path) -> None:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(TRAIN)
    with Node() as node:
        del node.env["OTEL_DDP_OVERHEAD"]
        training = node.torchrun(2, str(script), str(stop))
        until(lambda: late_ranks(node), "a late rank")
        shown, late = node.shown(), late_ranks(node)
        stop.touch()
        (steps,) = re.findall(r"steps (\d+)", finished(training))

        def counted() -> list[float]:
            return [value for _, value in node.series("training_steps_total")]

        until(lambda: counted() == [float(steps)] * 2, f"{steps} steps of each rank")
        ended = node.shown()

    assert late == {("1", "forward")}
    assert "measures 1 of " in shown
    assert "measures" not in ended
