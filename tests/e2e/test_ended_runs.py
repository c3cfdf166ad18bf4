"""Runs that end before their processes do, as the real agent sees them."""

from __future__ import annotations

from node import Node, until

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
