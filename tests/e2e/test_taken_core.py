"""A rank whose core another program takes, on real ranks: the verdict names the core."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from node import Node, finished, until
from otel_ddp.agent.reading.node_status import survey

pytestmark = [
    pytest.mark.timed,
    # On a busy machine cores are taken from both ranks.
    pytest.mark.stress,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank needs a core"),
]

# So many that what else runs on the other core does not matter.
TAKERS = 6

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

folder, cores = sys.argv[1], sorted(os.sched_getaffinity(0))
dist.init_process_group("gloo")
rank = dist.get_rank()
# All threads, those of the process group too.
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {cores[rank]})
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def batches():
    step = 0
    while step % 10 or not shared_end():
        yield torch.randn(256, 512)
        step += 1


def shared_end():
    enough = torch.tensor([float(os.path.exists(f"{folder}/enough"))])
    dist.broadcast(enough, src=0)
    return bool(enough)


otel_ddp.instrument(model, group="g", run="taken")
for batch in otel_ddp.data(batches()):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
# As long as its input is open.
TAKE = """
import os, sys, threading
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[1]})
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""


def test_a_rank_whose_core_is_taken_is_advised_to_look_there() -> None:
    with Node() as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        takers = [node.start(sys.executable, "-c", TAKE) for _ in range(TAKERS)]
        process = node.torchrun(2, str(script), str(node.root))

        def verdict() -> dict[str, Any] | None:
            found = survey([node.place]).verdicts
            named = "waited_for_core_s"
            return next((each for each in found if named in each["evidence"]), None)

        found = until(verdict, "a verdict that names the core")
        (node.root / "enough").touch()
        finished(process)
        for taker in takers:
            finished(taker)

    assert (found["kind"], found["who"]["rank"]) == ("straggler", "1")
    assert (
        "Its core is taken: in each step it is ready to run and has no core for "
        in found["sentence"]
    )
    assert "device" not in found["sentence"]
    evidence = found["evidence"]
    more_s = evidence["waited_for_core_s"] - evidence["others_waited_for_core_s"]
    assert more_s >= 0.5 * evidence["excess_s"]
