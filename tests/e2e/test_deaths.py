"""Deaths of real processes, seen by the real agent."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from node import Node, finished, until
from otel_ddp import files
from webhook import Webhook

SECRET = "T0k3n-of-the-webhook"
# What Linux tells from 6.15 on.
TELLS_EXITS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)

# Works until it is killed, or until its input ends; says when it stands where the test wants it.
WORK = """
import os, sys
import otel_ddp
run = otel_ddp.init(run="r", group="g")
run.log({"loss": 0.5 + int(os.environ["OTEL_DDP_RANK"])}, step=17)
with run.phase("backward"):
    print("there", flush=True)
    sys.stdin.read()
"""


class Ward(Node):
    """A node whose post-mortems can be read."""

    def states(self) -> dict[str, float]:
        return {labels["rank"]: state for labels, state in self.series("training_state")}

    def written(self) -> list[Path]:
        return sorted((self.root / "history").glob("postmortem-*.json"))

    def report(self) -> dict[str, Any] | None:
        """The one post-mortem that there is."""
        found = self.written()
        assert len(found) < 2, found
        # Its name is taken before it is written.
        return files.read_mapping(found[0]) or None if found else None

    def status(self) -> str:
        return finished(self.start(sys.executable, "-m", "otel_ddp", "status"))


class Killed(NamedTuple):
    """Three ranks, of which rank 1 is killed and the others end well, one after the other."""

    verdict: dict[str, Any]
    report: dict[str, Any]
    """The post-mortem."""
    status: str
    series: dict[str, float | None]
    """Of the killed rank, long after its journal has gone."""
    last_states: dict[str, float]
    reports: int
    messages: list[dict[str, Any]]
    page: str


@pytest.fixture(scope="module")
def killed() -> Killed:
    with Webhook() as webhook, Ward(OTEL_DDP_NOTIFY=f"{webhook.url}/{SECRET}") as node:
        ranks = [
            node.python(
                WORK,
                OTEL_DDP_RANK=str(rank),
                OTEL_DDP_LOCAL_RANK=str(rank),
                OTEL_DDP_WORLD_SIZE="3",
            )
            for rank in range(3)
        ]
        for each in ranks:
            assert each.stdout is not None
            assert "there\n" in iter(each.stdout.readline, "")
        until(lambda: node.states() == {"0": 1.0, "1": 1.0, "2": 1.0}, "the ranks")
        page = node.agent()["scrape"].replace("/metrics", "/run/r")

        ranks[1].kill()

        until(lambda: "SIGKILL" in str(node.report()) or not TELLS_EXITS, "the kernel's word")
        until(lambda: "1 taken" in str(node.agent()["notify"]), "the message")

        def shown() -> tuple[dict[str, Any], str] | None:
            # The sentence says more once the kernel has.
            report, status = node.report(), node.status()
            if report is None or report["verdict"]["sentence"] not in status:
                return None
            return report["verdict"], status

        verdict, status = until(shown, "the verdict in the status")
        report = node.report() or {}
        until(lambda: len(node.place.journals()) == 2, "the journal to go")
        # Between two signs of life of another rank the agent throws out what is over.
        alive = "training_heartbeat_timestamp_seconds"
        for _ in range(2):
            beat = node.value(alive, rank="0")
            until(lambda beat=beat: node.value(alive, rank="0") != beat, "a sign of life")
        series = {
            name: node.value(f"training_{name}", rank="1")
            for name in ("state", "phase", "step", "scalar")
        }
        for each in (ranks[2], ranks[0]):
            finished(each)  # closes its input
        until(lambda: [*node.states().values()].count(2.0) == 2, "both ends to be seen")
        last_states = node.states()
        node.stop_agent()
        # An address may be a secret.
        assert SECRET not in node.place.agent_log.read_text() + status
        return Killed(
            *(verdict, report, status, series, last_states, len(node.written())),
            *(webhook.of_kind("death"), page),
        )


def test_a_killed_rank_is_named_with_its_step_phase_and_cause_in_a_post_mortem(
    killed: Killed,
) -> None:
    assert killed.verdict["who"]["rank"] == "1"
    assert (killed.verdict["phase"], killed.verdict["step"]) == ("backward", 17)
    sentence = killed.report["verdict"]["sentence"]
    assert sentence.startswith("rank 1 (")
    assert "was killed in backward after step 17" in sentence
    states = {each["rank"]: (each["state"], each["phase"]) for each in killed.report["processes"]}
    assert {rank: state for rank, (state, _) in states.items()} == {
        0: "running",
        1: "killed",
        2: "running",
    }
    assert {phase for _, phase in states.values()} == {"backward"}
    assert "killed" in killed.status


def test_the_last_state_of_a_killed_rank_stays_when_its_journal_is_gone(killed: Killed) -> None:
    assert killed.series == {"state": 4.0, "phase": 3.0, "step": 17.0, "scalar": 1.5}


def test_a_rank_that_finishes_before_the_others_is_no_death(killed: Killed) -> None:
    assert killed.last_states == {"0": 2.0, "1": 4.0, "2": 2.0}
    assert killed.reports == 1


def test_people_are_told_once_of_a_killed_rank_with_its_cause(killed: Killed) -> None:
    (told,) = killed.messages
    assert (told["level"], told["group"], told["run"], told["rank"]) == ("error", "g", "r", "1")
    assert told["title"] == f"run r: rank 1 ({told['node']}) died"
    assert "was killed" in told["text"]
    assert "Post-mortem: " in told["text"]
    assert told["url"] == killed.page
