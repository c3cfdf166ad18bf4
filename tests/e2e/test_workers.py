"""Workers that their parents end, seen by the real agent: they have ended, and have not died."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence

from node import Node, until

# What Linux tells from 6.15 on.
TELLS_EXITS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)

RUNNING, FINISHED, FAILED, KILLED = 1.0, 2.0, 3.0, 4.0

# Children of the given kinds, each with a run of its own. The parent ends them when it is told to,
# or when one of them fails, and lives on.
CHILDREN = """
import multiprocessing, sys, time, otel_ddp

def child(kind, there, go):
    run = otel_ddp.init(run=f"{sys.argv[1]} {kind}", global_rank=0, world_size=1)
    run.log({"loss": 0.5})
    if kind == "busy":
        with run.phase("eval"):
            there.set()
            time.sleep(60)
    there.set()
    if kind == "fails":
        go.wait()
        raise ValueError("no more data")
    time.sleep(60)

if __name__ == "__main__":
    go = multiprocessing.Event()
    children = []
    kinds = sys.argv[2:]
    for kind in kinds:
        there = multiprocessing.Event()
        children.append(multiprocessing.Process(target=child, args=(kind, there, go)))
        children[-1].start()
        there.wait()
    print(*[each.pid for each in children], flush=True)
    sys.stdin.readline()
    go.set()
    if "fails" in kinds:
        children[kinds.index("fails")].join()
    for each in children:
        each.terminate()
    for each in children:
        each.join()
    sys.stdin.read()
"""

FAILS = ["fails", "idle"]


def program(node: Node, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A program as a file: a spawned child imports it again."""
    script = node.root / "program.py"
    script.write_text(code)
    if "torch" in code:
        return node.warm(str(script), *arguments)
    return node.start(sys.executable, str(script), *arguments)


def states(node: Node) -> dict[str, float]:
    return {labels["run"]: state for labels, state in node.series("training_state")}


def told(node: Node) -> list[str]:
    """The verdicts that the agent has ever reached."""
    described = node.agent()
    return [each["sentence"] for each in (*described["past"], *described["verdicts"])]


class Family:
    """A parent and children of these kinds, as the agent sees them."""

    def __init__(self, node: Node, name: str, kinds: Sequence[str]) -> None:
        self._node, self._name = node, name
        self.parent = program(node, CHILDREN, name, *kinds)
        assert self.parent.stdout is not None
        pids = map(int, self.parent.stdout.readline().split())
        self.pids = dict(zip(kinds, pids, strict=True))
        self.become(**dict.fromkeys(kinds, RUNNING))

    def end(self) -> None:
        """Let the parent end them."""
        assert self.parent.stdin is not None
        self.parent.stdin.write("end\n")
        self.parent.stdin.flush()

    def become(self, **expected: float) -> None:
        told = {f"{self._name} {kind}": state for kind, state in expected.items()}
        until(lambda: told.items() <= states(self._node).items(), str(told))


def test_a_child_that_is_ended_has_ended_only_if_all_was_well_and_it_had_nothing_to_do() -> None:
    with Node() as node:
        ended, failed = Family(node, "ended", ["idle", "busy"]), Family(node, "with", FAILS)
        killed, orphaned = Family(node, "killed", ["idle"]), Family(node, "orphaned", ["idle"])

        ended.end()
        failed.end()
        os.kill(killed.pids["idle"], signal.SIGKILL)
        killed.end()  # the parent asks the kernel
        os.killpg(orphaned.parent.pid, signal.SIGTERM)
        orphaned.parent.wait()

        # Where the kernel does not tell, it is not known that it was the parent.
        ended.become(idle=FINISHED, busy=KILLED)
        failed.become(fails=FAILED, idle=KILLED)
        if TELLS_EXITS:
            killed.become(idle=KILLED)
            orphaned.become(idle=KILLED)
        until(lambda: any("eval" in each for each in told(node)), "the verdict")
        shown = {each["run"]: each["state"] for each in node.processes()}
        assert (shown["ended idle"], shown["ended busy"]) == ("finished", "killed")


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
        containers = [program(node, CONTAINER, how) for how in ("returns", "raises")]
        for each in containers:
            assert each.stdout is not None
            said = iter(each.stdout.readline, "")
            assert not any("another thread" in line for line in iter(said.__next__, "over\n"))
        until(lambda: states(node) == {"returns": RUNNING, "raises": RUNNING}, "the runs")

        for each in containers:
            each.communicate("end\n")

        # Where it raised, in the middle of a step, the process has died.
        until(lambda: states(node) == {"returns": FINISHED, "raises": KILLED}, "the end")
        until(lambda: told(node), "the verdict")
        verdicts = [*node.agent()["past"], *node.agent()["verdicts"]]
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
        process = program(node, MANY_RUNS)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"

        until(lambda: not node.place.journals(), "the end of the journals")

        assert process.poll() is None
        assert states(node) == {str(number): FINISHED for number in range(12)}
