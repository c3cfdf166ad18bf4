"""Deaths of real processes, seen by the real agent."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node import Node, finished, until

# What Linux tells from 6.15 on.
TELLS_EXITS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)

# A directory of the memory controller in which tests may make groups; looked up before tests begin,
# as they see no variables of ours.
LENT_CGROUP = os.environ.get("OTEL_DDP_TEST_CGROUP", "")

# Works until it is killed, or until its input ends; says when it stands where the test wants it.
WORK = """
import os, sys
import otel_ddp
run = otel_ddp.init(run="r")
run.log({"loss": 0.5 + int(os.environ["OTEL_DDP_RANK"])}, step=17)
with run.phase("backward"):
    print("there", flush=True)
    sys.stdin.read()
"""


EATS = (
    WORK
    + """
held = []
while True:
    held.append(bytearray(1 << 20))
"""
)


# What two ranks do that torchrun starts; rank 1 ends in the middle of it.
TRAINS = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import otel_ddp

dist.init_process_group("gloo")
run = otel_ddp.init(run="r")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(100):
    if step == 20:
        # The agent is to know both while they live.
        with open(os.environ["GO"], "rb", buffering=0) as go:
            go.read(1)
        if dist.get_rank() == 1:
            {ending}
    model(torch.ones(2, 4)).sum().backward()
    run.log({{"loss": 0.5}}, step=step)
"""


class Ward(Node):
    """A node whose post-mortems can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.postmortems = self.root / "postmortems"
        self.env["OTEL_DDP_POSTMORTEM_DIR"] = str(self.postmortems)

    def ranks(self, count: int, code: str = WORK) -> list[subprocess.Popen[str]]:
        """So many ranks of one run, each where it is to be."""
        started = [
            self.python(
                code,
                OTEL_DDP_RANK=str(rank),
                OTEL_DDP_LOCAL_RANK=str(rank),
                OTEL_DDP_WORLD_SIZE=str(count),
            )
            for rank in range(count)
        ]
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == "there\n"
        until(lambda: self.states() == {str(rank): 1.0 for rank in range(count)}, "the ranks")
        return started

    def states(self) -> dict[str, float]:
        return {labels["rank"]: state for labels, state in self.series("training_state")}

    def written(self) -> list[Path]:
        return sorted(self.postmortems.glob("*.json"))

    def report(self) -> dict[str, Any] | None:
        """The one post-mortem that there is."""
        found = self.written()
        assert len(found) < 2, found
        return json.loads(found[0].read_text()) if found else None

    def report_on(self, count: int) -> dict[str, Any]:
        """The post-mortem, once it tells of so many ended processes."""

        def whole() -> dict[str, Any] | None:
            said = self.report()
            return said if said and len(said["verdict"]["evidence"]["ended"]) == count else None

        return dict(until(whole, f"a post-mortem of {count}"))


def test_a_killed_rank_is_named_with_its_step_phase_and_cause_in_a_post_mortem() -> None:
    with Ward() as node:
        processes = node.ranks(3)

        processes[1].kill()
        processes[1].wait()

        until(lambda: "SIGKILL" in str(node.report()) or not TELLS_EXITS, "the kernel's word")
        verdict = node.report_on(1)["verdict"]
        assert verdict["who"]["rank"] == "1"
        assert (verdict["phase"], verdict["step"]) == ("backward", 17)
        text = node.written()[0].with_suffix(".txt").read_text()
        assert text.startswith("rank 1 (")
        assert "was killed in backward at step 17" in text.splitlines()[0]
        rows = [line.split() for line in text.splitlines() if "backward  " in line]
        assert [(row[0], row[2]) for row in rows] == [
            ("0", "running"),
            ("1", "killed"),
            ("2", "running"),
        ]
        assert "0.5 to 2.5" in text


def torchrun(node: Ward, ending: str) -> None:
    """Two real ranks, of which rank 1 ends so at its step 20, until the launcher has given up."""
    script, go = node.root / "train.py", node.root / "go"
    script.write_text(TRAINS.format(ending=ending))
    os.mkfifo(go)
    node.env.update(CUDA_VISIBLE_DEVICES="", GO=str(go))
    launcher = node.torchrun(2, str(script))
    until(lambda: node.states() == {"0": 1.0, "1": 1.0}, "the ranks")
    # A letter for each of them, kept until both have come for it.
    with go.open("r+b", buffering=0) as written:
        written.write(b"go")
        assert launcher.wait(timeout=300) == 1


def told_by_status(node: Ward) -> list[str]:
    """What `otel-ddp status` says of the run, without the times before it."""
    output = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))
    return re.findall(r"^  ! \d\d:\d\d:\d\d: (.*)", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ('raise RuntimeError("bad batch in shard 7")', ": RuntimeError: bad batch in shard 7. "),
        pytest.param(
            "sys.exit(1)",
            ": exit code 1. ",
            marks=pytest.mark.skipif(not TELLS_EXITS, reason="this kernel keeps exit codes"),
        ),
    ],
    ids=["exception", "exit code"],
)
def test_what_ended_a_rank_under_torchrun_is_told_with_its_rank_and_written_down(
    ending: str, words: str
) -> None:
    with Ward() as node:
        torchrun(node, ending)

        until(lambda: words in str(node.report()), "the cause")
        verdict = node.report_on(2)["verdict"]
        assert verdict["who"]["rank"] == "1"
        assert verdict["step"] == 19
        text = node.written()[0].with_suffix(".txt").read_text()
        assert text.splitlines()[0] == verdict["sentence"]
        until(lambda: told_by_status(node) == [verdict["sentence"]], "the verdict in the status")


def test_a_rank_that_finishes_before_the_others_is_no_death() -> None:
    with Ward() as node:
        processes = node.ranks(2)

        for process in reversed(processes):
            finished(process)  # closes its input

        until(lambda: set(node.states().values()) == {2.0}, "both ends to be seen")
        node.stop_agent()
        assert node.written() == []


@contextlib.contextmanager
def limited(group: Path) -> Iterator[Path]:
    """A memory cgroup of 256 MiB."""
    group.mkdir()
    try:
        names = ("memory.max", "memory.limit_in_bytes")
        limit = next(group / name for name in names if (group / name).exists())
        limit.write_text(str(256 << 20))
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


@pytest.mark.skipif(not LENT_CGROUP, reason="OTEL_DDP_TEST_CGROUP lends no memory cgroup to tests")
def test_an_out_of_memory_kill_in_a_cgroup_is_told_as_one() -> None:
    # The agent that the rank starts is in the group as well, and ends with the node.
    with limited(Path(LENT_CGROUP) / f"otel_ddp-test-{os.getpid()}") as group, Ward() as node:
        # In the group before the agent knows of it.
        enters = f'echo $$ > {group}/cgroup.procs; exec "$0" -c "$1"'
        ranks = {"OTEL_DDP_RANK": "0", "OTEL_DDP_WORLD_SIZE": "1"}
        eating = node.start("sh", "-c", enters, sys.executable, EATS, env=ranks)
        until(lambda: node.states() == {"0": 1.0}, "the rank")

        eating.communicate()  # closes its input

        verdict = node.report_on(1)["verdict"]
        assert verdict["who"]["rank"] == "0"
        assert "its memory cgroup was full" in verdict["sentence"]


def test_the_last_state_of_a_killed_rank_stays_when_its_journal_is_gone() -> None:
    with Ward() as node:
        killed, _ = node.ranks(2)

        killed.kill()

        until(lambda: len(node.place.journals()) == 1, "the journal to go")
        # Between two signs of life of the other rank the agent throws out what is over.
        for _ in range(2):
            beat = node.value("training_heartbeat_timestamp_seconds", rank="1")
            assert beat is not None
            until(
                lambda before=beat: (
                    node.value("training_heartbeat_timestamp_seconds", rank="1") != before
                ),
                "a sign of life",
            )
        assert node.value("training_state", rank="0") == 4.0
        assert node.value("training_phase", rank="0") == 3.0
        assert node.value("training_step", rank="0") == 17.0
        assert node.value("training_scalar", name="loss", rank="0") == 0.5


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("os._exit(0)", "finished"),
        ("os.execv('/bin/cat', ['cat'])", "finished"),
        ("os._exit(3)", "killed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed"),
    ],
)
@pytest.mark.parametrize("where", ["a program", "a fork"])
def test_a_process_without_a_last_word_is_killed_only_if_it_did_not_end_well(
    end: str, state: str, where: str
) -> None:
    # A parent that does not ask how its child ended, and one that does at once.
    fork = "if os.fork():\n    sys.stdin.read()\n    os._exit(0)\n" if where == "a fork" else ""
    code = f"import os, signal, sys\nimport otel_ddp\n{fork}run = otel_ddp.init(run='r')\n"
    code += f"run.log({{'x': 1.0}})\nprint(sys.stdin.readline(), flush=True)\n{end}\n"
    code = code.replace("sys.stdin.readline()", "os.getpid()") if fork else code
    with Node() as node:
        process = node.python(code)
        until(lambda: node.place.agent_is_alive(), "the agent")
        if not fork:
            until(node.processes, "the process")
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

        def ended() -> list[str]:
            found = [str(each["state"]) for each in node.agent()["ended"]]
            return found or []

        assert until(ended, "the end") == [state]
