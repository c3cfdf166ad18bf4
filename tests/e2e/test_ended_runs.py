"""Runs that end before their processes do, as the real agent sees them."""

from __future__ import annotations

from pathlib import Path

from node import Node, finished, until
from otel_ddp.history.directory import find_run

FINISHED = 2.0


def states(node: Node) -> dict[str, float]:
    return {labels["run"]: state for labels, state in node.series("training_state")}


MANY_RUNS = """
import sys, otel_ddp
for number in range(12):
    with otel_ddp.init(run=str(number)) as run:
        run.log({"loss": 0.5})
print("there", flush=True)
sys.stdin.read()
"""


def test_runs_that_a_living_process_has_ended_give_their_memory_back() -> None:
    with Node() as node:
        process = node.python(MANY_RUNS)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"

        until(lambda: not node.place.journals(), "the end of the journals")

        assert process.poll() is None
        assert states(node) == {str(number): FINISHED for number in range(12)}


TWO_RUNS = """
import torch, otel_ddp
for name in ("first", "second"):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with otel_ddp.instrument(model, run=name):
        for step in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
"""


def test_the_second_run_of_a_launched_process_has_no_time_of_the_first() -> None:
    with Node() as node:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        finished(node.warm("-c", TWO_RUNS, env=rank))
        node.agent()
        until(lambda: not node.place.journals(), "the end of the journals")

        attempts = []
        for name in ("first", "second"):
            with find_run(name, Path(node.env["OTEL_DDP_HISTORY_DIR"])) as run:
                attempts += run.about["attempts"]

        first, second = attempts
        assert second["began_ns"] >= first["ended_ns"]
