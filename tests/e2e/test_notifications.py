"""The real agent tells a webhook of real runs, and shows its address nowhere."""

from __future__ import annotations

import sys

from node import Node, finished, until
from webhook import Webhook

SECRET = "T0k3n-of-the-webhook"

# Works until it is killed, or until its input ends.
WORK = """
import logging, os, sys
import otel_ddp
run = otel_ddp.init(run="r", group="g")
logging.basicConfig()
run.logs(logger="root")
run.log({"loss": 0.5}, step=17)
logging.getLogger("work").warning("the last thing that rank %s said", os.environ["OTEL_DDP_RANK"])
with run.phase("backward"):
    print("there", flush=True)
    sys.stdin.read()
"""


def test_a_killed_rank_is_told_once_with_its_cause_and_its_last_lines(webhook: Webhook) -> None:
    with Node(OTEL_DDP_NOTIFY=f"{webhook.url}/{SECRET}") as node:
        ranks = [
            node.python(
                WORK,
                OTEL_DDP_RANK=str(rank),
                OTEL_DDP_LOCAL_RANK=str(rank),
                OTEL_DDP_WORLD_SIZE="2",
            )
            for rank in range(2)
        ]
        for each in ranks:
            assert each.stdout is not None
            assert any(line == "there\n" for line in each.stdout)
        page = node.agent()["scrape"].removesuffix("/metrics")
        until(lambda: len(node.series("training_state")) == 2, "the ranks")

        ranks[1].kill()

        until(lambda: webhook.of_kind("death"), "the message")
        until(lambda: "1 taken" in str(node.agent()["notify"]), "the agent's file")
        status = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))
        # The agent tells all that it has to when it leaves.
        node.stop_agent()
        shown = node.place.agent_log.read_text() + status
    (told,) = webhook.of_kind("death")
    assert told["level"] == "error"
    assert (told["group"], told["run"], told["rank"]) == ("g", "r", "1")
    assert told["title"] == f"run r: rank 1 ({told['node']}) died"
    assert "was killed" in told["text"]
    assert "the last thing that rank 1 said" in told["text"]
    assert "the last thing that rank 0 said" not in told["text"]
    assert "Post-mortem: " in told["text"]
    assert told["url"] == f"{page}/run/r"
    assert f"notify    to 1 address ({webhook.url}): 1 taken\n" in status
    assert SECRET not in shown


def test_an_agent_whose_training_has_ended_stays_until_its_message_is_taken(
    webhook: Webhook,
) -> None:
    webhook.code = 503
    code = "import otel_ddp; otel_ddp.init(run='r').alert('now'); print('done')"
    with Node(OTEL_DDP_NOTIFY=webhook.url, OTEL_DDP_LINGER_S="1") as node:
        node.run(code)
        until(lambda: said_of_failure(node) and not node.place.journals(), "nothing else to do")
        webhook.code = 200

        until(lambda: webhook.of_kind("alert"), "the message")
        until(lambda: not node.place.agent_is_alive(), "the agent's end")
    assert len(webhook.of_kind("alert")) == 1


def test_an_agent_that_does_not_linger_still_tells_that_a_run_has_failed(webhook: Webhook) -> None:
    code = "import otel_ddp; otel_ddp.init(run='r').log({'x': 1.0}); raise ValueError('no data')"
    with Node(OTEL_DDP_NOTIFY=webhook.url, OTEL_DDP_LINGER_S="0") as node:
        node.python(code).communicate()

        until(lambda: webhook.attempts and not node.place.agent_is_alive(), "the agent's end")
    (died,), (ended,) = webhook.of_kind("death"), webhook.of_kind("ended")
    assert "no data" in died["text"]
    assert ended["title"].startswith("run r failed after ")


def said_of_failure(node: Node) -> str:
    told = str(node.agent()["notify"])
    return told if "last failure" in told else ""
