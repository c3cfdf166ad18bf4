"""The death of a real process, seen by the real agent."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from node import Node, finished, until
from otel_ddp import files
from trainings import as_launched
from webhook import Webhook

SECRET = "T0k3n-of-the-webhook"
# What Linux tells from 6.15 on.
TELLS_EXITS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)

# Works until it is killed, or until its input ends; says when it stands where the test wants it.
WORK = """
import os, sys
import otel_ddp
run = otel_ddp.init(run="r", group="g")
run.log({"loss": 0.5 + int(os.environ["RANK"])}, step=17)
with run.phase("backward"):
    print("there", flush=True)
    sys.stdin.read()
"""


class Ward(Node):
    """A node of three ranks, whose post-mortems can be read."""

    def three_ranks(self) -> list[subprocess.Popen[str]]:
        ranks = [self.python(WORK, **as_launched(rank, 3, 3)) for rank in range(3)]
        for each in ranks:
            assert each.stdout is not None
            assert "there\n" in iter(each.stdout.readline, "")
        until(lambda: self.states() == {"0": 1.0, "1": 1.0, "2": 1.0}, "the ranks")
        return ranks

    def states(self) -> dict[str, float]:
        return {labels["rank"]: state for labels, state in self.series("training_state")}

    def written(self) -> list[Path]:
        return sorted((self.root / "history").glob("postmortem-*.json"))

    def report(self) -> dict[str, Any]:
        """The one post-mortem that there is."""
        found = self.written()
        assert len(found) < 2, found
        # Its name is taken before it is written.
        return dict(files.read_mapping(found[0])) if found else {}

    def status(self) -> str:
        return finished(self.start(sys.executable, "-m", "otel_ddp", "status"))


def test_a_killed_rank_is_named_with_its_step_phase_and_cause_in_a_post_mortem() -> None:
    with Webhook() as webhook, Ward(OTEL_DDP_NOTIFY=f"{webhook.url}/{SECRET}") as node:
        ranks = node.three_ranks()
        page = node.agent()["scrape"].replace("/metrics", "/run/r")

        ranks[1].kill()

        until(lambda: "SIGKILL" in str(node.report()) or not TELLS_EXITS, "the kernel's word")
        until(lambda: "1 taken" in str(node.agent()["notify"]), "the message")
        # The sentence says more once the kernel has.
        until(lambda: node.report()["verdict"]["sentence"] in node.status(), "it in the status")
        report, status = node.report(), node.status()
        until(lambda: len(node.place.journals()) == 2, "the journal to go")
        # Between two signs of life of another rank the agent throws out what is over.
        alive = "training_heartbeat_timestamp_seconds"
        for _ in range(2):
            beat = node.value(alive, rank="0")
            until(lambda beat=beat: node.value(alive, rank="0") != beat, "a sign of life")
        names = ("state", "phase", "step", "scalar")
        last = {name: node.value(f"training_{name}", rank="1") for name in names}
        for each in (ranks[2], ranks[0]):
            finished(each)  # closes its input
        # Who finishes before the others has not died.
        until(lambda: node.states() == {"0": 2.0, "1": 4.0, "2": 2.0}, "both ends to be seen")
        node.stop_agent()
        assert len(node.written()) == 1
        # An address may be a secret.
        assert SECRET not in node.place.agent_log.read_text() + status

    verdict = report["verdict"]
    assert (verdict["who"]["rank"], verdict["phase"], verdict["step"]) == ("1", "backward", 17)
    assert verdict["sentence"].startswith("rank 1 (")
    assert "was killed in backward after step 17" in verdict["sentence"]
    states = {each["rank"]: (each["state"], each["phase"]) for each in report["processes"]}
    assert states == {n: ("killed" if n == 1 else "running", "backward") for n in range(3)}
    assert last == {"state": 4.0, "phase": 3.0, "step": 17.0, "scalar": 1.5}
    (told,) = webhook.of_kind("death")
    assert (told["level"], told["group"], told["run"], told["rank"]) == ("error", "g", "r", "1")
    assert told["title"] == f"run r: rank 1 ({told['node']}) died"
    assert "was killed" in told["text"]
    assert "Post-mortem: " in told["text"]
    assert told["url"] == page
