"""An agent keeps the history of a run: every value and step of every rank, and how it ended."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from node import Node, finished, until
from otel_ddp.history.directory import histories
from otel_ddp.history.reader import History, Unreadable

STEPS = 400
TRAIN = """
import os, sys
import torch
import otel_ddp
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = otel_ddp.instrument(model, optimizer=optimizer, group="g", run="kept", config={"lr": 0.3})
rank = int(os.environ["RANK"])
for step in range(400):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    run.log({"loss": step + rank / 10, "val/acc": step}, step=step)
    if step == 200:
        print("half", flush=True)
        sys.stdin.readline()
run.event("the end", why="enough")
if rank:
    raise RuntimeError("lost")
run.finish()
"""


WORLD = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def history(node: Node) -> Path | None:
    """Once it can be read: it is made empty."""
    for path in histories(Path(node.env["OTEL_DDP_HISTORY_DIR"])):
        with contextlib.suppress(Unreadable), History(path):
            return path
    return None


def test_every_value_and_step_is_shown_and_kept_once_though_the_agent_is_killed() -> None:
    with Node() as node:
        ranks = [
            node.warm("-c", TRAIN, env={**WORLD, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
        ]
        for rank in ranks:
            assert rank.stdout is not None
            assert "half\n" in iter(rank.stdout.readline, "")
        path = until(lambda: history(node), "a history")
        until(lambda: values(path) >= 4 * 201, "half of the values")
        check_page(node)
        node.kill_agent()
        for rank in ranks:
            rank.communicate("\n", timeout=180)
        until(lambda: ended(path), "the end")

        with History(path) as found:
            assert found.about["config"] == {"lr": 0.3}
            assert {rank: each["state"] for rank, each in found.ranks.items()} == {
                "0": "finished",
                "1": "failed",
            }
            assert found.state == "failed"
            curves = {
                (each.key.name, each.key.rank): [b.last for b in found.sums(each)]
                for each in found.series("value")
            }
            for rank in (0, 1):
                assert curves["loss", str(rank)] == [step + rank / 10 for step in range(STEPS)]
                assert curves["val/acc", str(rank)] == list(range(STEPS))
            for series in found.step_series.values():
                steps = found.steps(series)
                # The step that the agent had read in part when it was killed is known to none.
                assert STEPS - 1 <= sum(each.steps for each in steps) <= STEPS
                assert sum(each.phases_ns["forward"] for each in steps) > 0
            assert [e.attributes["why"] for e in found.events(like="the end")] == ["enough"] * 2


def check_page(node: Node) -> None:
    """What a browser is told while both ranks stand at step 200."""
    head = node.page("run", run="kept")
    assert (head["group"], head["state"], head["config"]) == ("g", "running", {"lr": 0.3})
    assert [(each["rank"], each["step"]) for each in head["ranks"]] == [("0", 200), ("1", 200)]
    answer = node.page("values", run="kept", name="loss")
    assert {each["rank"]: each["columns"]["last"][-1] for each in answer["series"]} == {
        "0": 200.0,
        "1": 200.1,
    }
    assert {each["rank"] for each in node.page("now")["processes"]} == {0, 1}
    [process] = node.page("stacks", "POST", group="g", run="kept", rank="1")["processes"]
    frames = [frame for each in process["threads"] for frame in each["frames"]]
    assert any(frame["function"] == "<module>" for frame in frames), process
    [row] = node.page("runs")["runs"]
    assert (row["run"], row["state"], row["step"]) == ("kept", "running", 200)


def values(path: Path) -> int:
    with History(path) as found:
        return sum(b.finite for each in found.series("value") for b in found.sums(each))


def ended(path: Path) -> bool:
    with History(path) as found:
        return found.state in ("finished", "failed", "killed")


def test_the_page_tells_what_time_has_cost() -> None:
    train = TRAIN.replace("    if step == 200", "    if step == 1000")
    with Node(OTEL_DDP_GPU_HOUR_PRICE="3600 EUR") as node:
        finished(node.warm("-c", train, env={"RANK": "0"}))
        until(lambda: about(node, "kept"), "the history of the run")

        def ended() -> Any:
            head = node.page("run", run="kept")
            return head["time"] if head["state"] == "finished" else None

        told = until(ended, "the end on the page")

    # A euro a second.
    assert (told["currency"], told["cost"]) == ("EUR", pytest.approx(told["rank_s"]))
    assert [each["name"] for each in told["causes"]][:2] == ["productive", "start"]


def test_a_run_that_no_agent_watched_ended_when_it_says_so() -> None:
    run = "import otel_ddp\notel_ddp.init(run={name!r}).finish()"
    with Node() as node:
        node.run(run.format(name="before"), OTEL_DDP_AGENT="off")
        over_ns = time.time_ns()
        node.run(run.format(name="after"))

        found = until(lambda: about(node, "before"), "the history of the first run")
        assert found["seen_ns"] <= over_ns


def about(node: Node, run: str) -> dict[str, Any]:
    """What the history of this run says of it; nothing while there is none."""
    for path in histories(Path(node.env["OTEL_DDP_HISTORY_DIR"])):
        with contextlib.suppress(Unreadable), History(path) as history:
            if history.about.get("run") == run:
                return history.about
    return {}
