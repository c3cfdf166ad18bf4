"""Two agents of one run: what either knows, both say. Their nodes are two places on one machine."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from node import Node, until
from otel_ddp.cli import main
from trainings import Training

# A hang is named, and none but the rank that hangs.
pytestmark = pytest.mark.timed

LIMIT_S = 8.0


def stall_on(node: Node) -> dict[str, Any] | None:
    """The open verdict on a hang, as the agent of this node has it."""
    return next((dict(each) for each in node.told().verdicts if each["kind"] == "stall"), None)


def culprits(node: Node) -> list[tuple[str, str]]:
    return [(who["rank"], who["cause"]) for who, _ in node.series("training_stall_culprit")]


def test_a_hang_is_named_on_both_nodes_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as life:
        one, other = (
            life.enter_context(
                Node(OTEL_DDP_NODE=f"node-{number}", OTEL_DDP_STALL_TIMEOUT_S=str(LIMIT_S))
            )
            for number in range(2)
        )
        training = Training(tmp_path, [one, other])
        training.start(TORCHELASTIC_RUN_ID="two-agents")
        leads = "this agent leads the run, with 1 other node: listens on"
        until(lambda: leads in one.shown(), "the link")
        row = r"^ +!?3 +1 +node-1 +[█░]{10} +\d+% +[\d.]+ m?s "
        until(lambda: re.search(row, one.shown(), re.M), "rank 3 and its waits on node-0")
        led = "judged by the agent of node-0: connected to node-0"
        until(lambda: led in other.shown(), "the other end of the link")

        training.trouble(3, "hang")

        for node in (one, other):
            stall = until(lambda node=node: stall_on(node), "the verdict on each node")
            assert stall["evidence"]["culprits"] == ["3"]
            assert "rank 3 (node-1) is in data" in stall["sentence"]
            assert "training.py:" in stall["sentence"]
        until(lambda: culprits(other) == [("3", "not_reached")], "the culprit on its own node")
        assert culprits(one) == []
        assert main(["stacks", "--rank", "3", "--dir", str(one.place.directory)]) == 0
        assert "training.py" in capsys.readouterr().out
