"""A loss that is lost, as the real agent tells of it: on which rank, and in which step."""

from __future__ import annotations

import re
import sys
from typing import Any

from node import Node, finished, until
from otel_ddp.journal.survey import survey
from otlp_receiver import Receiver

# Learns until its loss is lost; then it waits for the end of its input.
LOSES_IT = """
import sys
import otel_ddp
run = otel_ddp.init(group="g", run="lost")
rank, lost_at = int(sys.argv[1]), int(sys.argv[2])
for step in range(400):
    loss = 1.0 / (step + 1) if step < lost_at else float("nan")
    run.log({"loss": loss, "lr": 0.1}, step=step)
    if step == lost_at and "raise" in sys.argv:
        raise SystemExit("the loss is lost")
sys.stdin.read()
"""


def test_a_loss_that_is_lost_with_the_last_value_of_a_process_is_told() -> None:
    with Node() as node:
        node.start(sys.executable, "-c", LOSES_IT, "0", "200", "raise")

        (verdict,) = until(lambda: told(node), "the verdict")

    assert (verdict["kind"], verdict["evidence"]["value"]) == ("nonfinite", "NaN")


def told(node: Node) -> list[dict[str, Any]]:
    return [each for each in survey([node.place]).verdicts if each["step"] == 200]


def test_a_loss_that_becomes_nan_is_told_with_its_rank_and_step() -> None:
    with Node() as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        # As it goes with averaged gradients: the other rank loses it one step later.
        processes = [
            node.start(
                *(sys.executable, "-c", LOSES_IT, str(rank), str(200 + 1 - rank)),
                env={"OTEL_DDP_RANK": str(rank), "OTEL_DDP_WORLD_SIZE": "2"},
            )
            for rank in (0, 1)
        ]

        (verdict,) = until(lambda: told(node), "the verdict")
        shown = node.run("from otel_ddp.cli import main; main(['status'])")
        for process in processes:
            finished(process)  # closes its input
        node.stop_agent()
        records = [each for each in receiver.logs() if each.event_name == "training.nonfinite"]

    assert (verdict["kind"], verdict["who"]["run"]) == ("nonfinite", "lost")
    assert verdict["sentence"].startswith("loss became NaN at step 200 on rank 1 (")
    assert verdict["evidence"]["names"] == ["loss"]
    assert re.search(rf"! since [\d:]+: {re.escape(verdict['sentence'])}", shown)
    assert records[-1].severity_text == "WARN"
    assert records[-1].body.string_value == verdict["sentence"]
