"""Runs that end before their processes do, as the real agent sees them."""

from __future__ import annotations

from node import Node, until

RUNNING, FINISHED, KILLED = 1.0, 2.0, 4.0


def states(node: Node) -> dict[str, float]:
    return {labels["run"]: state for labels, state in node.series("training_state")}


# A container calls the function that trains in a thread, and leaves with 1 when it is done with it.
CONTAINER = """
import os, sys, threading, torch, otel_ddp

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    otel_ddp.instrument(model, run=sys.argv[1])
    for step, batch in enumerate(torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=8)):
        loss = model(batch).sum()
        if step == 3 and sys.argv[1] == "raises":
            return
        loss.backward()
        optimizer.step()

thread = threading.Thread(target=train)
thread.start()
thread.join()
print("over", flush=True)
sys.stdin.readline()
os._exit(1)
"""


def test_a_training_that_has_returned_is_no_death_when_its_container_leaves_with_a_code() -> None:
    with Node() as node:
        containers = [node.warm("-c", CONTAINER, how) for how in ("returns", "raises")]
        for each in containers:
            assert each.stdout is not None
            said = iter(each.stdout.readline, "")
            assert not any("another thread" in line for line in iter(said.__next__, "over\n"))
        until(lambda: states(node) == {"returns": RUNNING, "raises": RUNNING}, "the runs")

        for each in containers:
            each.communicate("end\n")

        # Where it raised, in the middle of a step, the process has died.
        until(lambda: states(node) == {"returns": FINISHED, "raises": KILLED}, "the end")
        verdicts = until(lambda: [*node.told().past, *node.told().verdicts], "the verdict")
        assert {each["who"]["run"] for each in verdicts} == {"raises"}
        assert node.value("training_steps_total", run="returns") == 5
        assert node.value("training_samples_total", run="returns") == 40


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
