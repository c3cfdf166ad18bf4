"""The agent of one node: ports, and runs that end before their processes do."""

from __future__ import annotations

import os
from pathlib import Path

from node import Node, finished, until
from otel_ddp.history.directory import find_run
from trainings import PROGRAM


def listened_on(pid: int) -> list[str]:
    """The local ends on which a process listens, as the kernel writes them."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_the_agent_of_a_run_on_one_node_opens_no_port_for_others_and_loads_nothing_for_it(
    tmp_path: Path,
) -> None:
    with Node() as node:
        node.torchrun(2, str(PROGRAM), str(tmp_path))
        pid = int(node.agent()["pid"])
        until(lambda: len(node.series("training_scalar", name="samples")) == 2, "both ranks")

        ends = listened_on(pid)
        loaded = Path(f"/proc/{pid}/maps").read_text()

    # Its endpoint, on 127.0.0.1.
    assert [end.partition(":")[0] for end in ends] == ["0100007F"]
    assert "cygrpc" not in loaded
    assert "cryptography" not in loaded


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
