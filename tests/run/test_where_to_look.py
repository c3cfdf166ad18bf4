"""A run says once where it can be looked at, and `otel-ddp open` goes there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from node import Node, finished, until
from otel_ddp.identity import addresses
from otel_ddp.run import announcements

TRAIN = """
import os, time
import otel_ddp
run = otel_ddp.init(group="g", run="lr 0.3/<b>")
agent = os.path.join(os.environ["OTEL_DDP_DIR"], "agent.json")
step = after = 0
# On a busy machine an agent starts late: the line follows within a second.
while after < 20:
    run.log({"loss": step}, step=step)
    step, after = step + 1, after + os.path.exists(agent)
    time.sleep(0.1)
run.finish()
"""
SHORT = "import otel_ddp; otel_ddp.init(run='a').log({'loss': 1.0})"
# Hooks alone see this one.
TRAIN_WITHOUT_LOG = """
import os, sys, time
import torch
import otel_ddp

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
otel_ddp.instrument(model, run="silent")
while not os.path.exists(sys.argv[1]):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""
BASE = "http://localhost:9464"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(OTEL_DDP_SAY="auto") as found:
        yield found


def said(output: str) -> list[str]:
    """Where to look. On a slow machine a run is long enough for a card at its end, too."""
    return [
        each for each in output.splitlines() if each.startswith("otel_ddp: run") and " · " in each
    ]


def test_the_first_rank_says_it_once_and_the_command_goes_there(node: Node) -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [node.python(TRAIN, **world, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    first, second = (said(finished(each)) for each in ranks)

    page = node.agent()["scrape"].replace("127.0.0.1", "localhost").removesuffix("/metrics")
    address = f"{page}/run/lr%200.3%2F%3Cb%3E"
    assert first == [f"otel_ddp: run lr 0.3/<b> · {address}"]
    assert second == []
    opened = node.start(
        *(sys.executable, "-m", "otel_ddp", "open"), env={"BROWSER": "echo opened %s"}
    )
    of_group = f"{address}?group=g"
    assert finished(opened).splitlines() == [of_group, f"opened {of_group}"]


def test_a_short_run_says_it_at_its_end(node: Node) -> None:
    # The agent may not be up before this one is over.
    finished(node.python(SHORT))
    node.agent()

    assert len(said(finished(node.python(SHORT)))) == 1
    assert said(finished(node.python(SHORT, OTEL_DDP_SAY="nothing"))) == []

    node.kill_agent()
    until(lambda: addresses.page(node.place) == "", "no address")


def test_a_training_that_logs_nothing_says_it_and_gets_its_agent_back(node: Node) -> None:
    enough = node.root / "enough"
    training = node.warm("-c", TRAIN_WITHOUT_LOG, str(enough))
    assert training.stdout is not None
    line = next(each for each in training.stdout if said(each))
    killed = node.kill_agent()
    until(lambda: node.place.agent_pid() not in (None, killed), "another agent")
    enough.touch()

    assert line.startswith("otel_ddp: run silent · http://localhost:")
    assert said(finished(training)) == []


def test_the_tunnel_is_for_those_who_came_by_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "gpu-7")
    ssh = {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 22"}

    assert addresses.tunnel(BASE, {}) == ""
    assert addresses.tunnel(BASE, {"SSH_CONNECTION": "nonsense"}) == ""
    assert addresses.tunnel("http://gpu-7:9464", ssh) == ""
    assert addresses.tunnel(BASE, ssh) == "ssh -L 9464:localhost:9464 ada@10.0.0.1"
    other_port = {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 2222"}
    assert addresses.tunnel(BASE, other_port) == "ssh -L 9464:localhost:9464 -p 2222 ada@10.0.0.1"
    # A job has the variable of the machine on which it was submitted.
    job = {**ssh, "SLURM_JOB_ID": "7"}
    assert addresses.tunnel(BASE, job) == "ssh -L 9464:localhost:9464 -J ada@10.0.0.1:22 ada@gpu-7"


def test_a_name_that_controls_a_terminal_is_written_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    announcements.say("otel_ddp: run a\u202eb\x1b[2Jc\u2066d\x07é · http://x\nnext\n")

    assert capsys.readouterr().err == (
        "otel_ddp: run a\\u202eb\\x1b[2Jc\\u2066d\\x07é · http://x\nnext\n"
    )
