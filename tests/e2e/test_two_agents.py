"""Two agents of one run: what either knows, both say. Their nodes are two places on one machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from node import Node, until
from otel_ddp.cli import main
from trainings import Training

# A late rank is named, and none but it.
pytestmark = pytest.mark.timed

FLOOR_S = 8.0


class TwoAgents(Training):
    """Two ranks on each of two nodes, in one run."""

    def verdict(self, number: int, kind: str) -> dict[str, Any]:
        """The open verdict of this kind, as the agent of this node has it."""

        def one() -> dict[str, Any] | None:
            found = self.nodes[number].told().verdicts
            return next((each for each in found if each["kind"] == kind), None)

        return dict(until(one, f"a verdict ({kind}) on node-{number}"))

    def status(self, number: int) -> str:
        return self.nodes[number].shown()


def stalled(node: Node) -> set[float]:
    return {value for _, value in node.series("training_stalled")}


def culprits(node: Node) -> list[tuple[str, str]]:
    return [(who["rank"], who["cause"]) for who, _ in node.series("training_stall_culprit")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoAgents]:
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                Node(OTEL_DDP_NODE=f"node-{number}", OTEL_DDP_STALL_TIMEOUT_S=str(FLOOR_S))
            )
            for number in range(2)
        ]
        made = TwoAgents(tmp_path_factory.mktemp("run"), nodes)
        made.start(TORCHELASTIC_RUN_ID="two-agents")
        yield made


def test_profile_says_on_which_other_node_a_rank_runs(
    run: TwoAgents, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: "with 1 other node: listens on" in run.status(0), "the link")
    row = r"^ +!?3 +1 +node-1 +[█░]{10} +\d+% +[\d.]+ m?s "
    until(lambda: re.search(row, run.status(0), re.M), "rank 3 and its waits on node-0")

    assert main(["profile", "--dir", str(run.nodes[0].place.directory), "--rank", "3"]) == 2

    said = capsys.readouterr().err.splitlines()
    assert said[1:] == ["Rank 3 runs on node-1: use this command there."]


def test_each_view_on_the_other_node_says_where_all_ranks_are_shown(
    run: TwoAgents, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*command: str) -> str:
        main(list(command))
        return "".join(capsys.readouterr())

    def views(number: int) -> dict[str, str]:
        node = run.nodes[number]
        os.environ["OTEL_DDP_HISTORY_DIR"] = node.env["OTEL_DDP_HISTORY_DIR"]
        here, out = ("--dir", str(node.place.directory)), str(tmp_path / f"{number}")
        return {
            "status": run.status(number),
            "stacks": shown("stacks", "--rank", "9", *here),
            "profile": shown("profile", "--rank", "9", *here),
            "report": shown("report", "--out", out),
            "report.json": "".join(each.read_text() for each in Path(out).glob("report.json")),
            "card": shown("report", "--card"),
            "compare": shown("compare", "two-agents", "two-agents"),
            "now": str(node.page("now")),
            "run": str(node.page("run", run="two-agents")),
        }

    def telling(number: int) -> dict[str, bool]:
        look = "all ranks of this run are shown on node-0"
        return {view: look in text for view, text in views(number).items()}

    until(lambda: all(telling(1).values()), "each view on node-1")
    assert not any(telling(0).values())


def test_a_hang_is_named_on_both_nodes_with_its_line(
    run: TwoAgents, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "leads the run" not in run.status(1)
    assert "this agent leads the run, with 1 other node: listens on" in run.status(0)
    assert "judged by the agent of node-0: connected to node-0" in run.status(1)
    run.trouble(3, "hang")
    stalls = [run.verdict(number, "stall") for number in (0, 1)]

    for each in stalls:
        assert each["evidence"]["culprits"] == ["3"]
        assert "rank 3 (node-1) is in data" in each["sentence"]
        assert "training.py:" in each["sentence"]
    until(lambda: all(stalled(node) == {1.0} for node in run.nodes), "all ranks stand")
    until(lambda: culprits(run.nodes[1]) == [("3", "not_reached")], "the culprit on its own node")
    assert culprits(run.nodes[0]) == []
    assert main(["stacks", "--rank", "3", "--dir", str(run.nodes[0].place.directory)]) == 0
    assert "training.py" in capsys.readouterr().out
