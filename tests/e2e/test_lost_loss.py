"""A loss that is lost with the last value of a process, as the real agent tells of it."""

from __future__ import annotations

from typing import Any

from node import Node, until
from otel_ddp.journal.survey import survey

LOSES_IT = """
import otel_ddp
run = otel_ddp.init(group="g", run="lost")
for step in range(200):
    run.log({"loss": 1.0 / (step + 1), "lr": 0.1}, step=step)
run.log({"loss": float("nan"), "lr": 0.1}, step=200)
raise SystemExit("the loss is lost")
"""


def test_a_loss_that_is_lost_with_the_last_value_of_a_process_is_told() -> None:
    with Node() as node:
        node.python(LOSES_IT)

        (verdict,) = until(lambda: told(node), "the verdict")

    assert (verdict["kind"], verdict["evidence"]["value"]) == ("nonfinite", "NaN")


def told(node: Node) -> list[dict[str, Any]]:
    return [each for each in survey([node.place]).verdicts if each["step"] == 200]
