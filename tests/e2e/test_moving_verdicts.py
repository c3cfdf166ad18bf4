"""A straggler whose lateness grows, and whose run then ends, as `otel-ddp status` shows it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from node import Node, finished, until
from otel_ddp.agent.reading.node_status import survey
from otel_ddp.cli.node.status import lines
from otlp_receiver import Receiver

pytestmark = pytest.mark.timed

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def batches():
    # Rank 1 is 12 ms late in each step of 20 ms or so; then 40 ms, until the test has seen it.
    while True:
        grown = os.path.exists(f"{folder}/grown")
        time.sleep(0.02 + rank * (0.04 if grown else 0.012))
        yield torch.randn(4, 8)


otel_ddp.instrument(model, group="g", run="grows")
for batch in otel_ddp.data(batches()):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    enough = torch.tensor([float(os.path.exists(f"{folder}/enough"))])
    dist.all_reduce(enough)
    if enough:
        break
dist.destroy_process_group()
"""


def straggler(node: Node) -> dict[str, Any] | None:
    found = survey([node.place]).verdicts
    return next((each for each in found if each["kind"] == "straggler"), None)


class Seen:
    """The launch, as it was seen."""

    def __init__(self) -> None:
        with Node() as node, Receiver() as receiver:
            node.export_to(receiver.start_http())
            script = node.root / "train.py"
            script.write_text(TRAIN)
            process = node.torchrun(2, str(script), str(node.root))
            self.first = until(lambda: straggler(node), "the verdict")
            (node.root / "grown").touch()
            self.last = until(lambda: self._grown(node), "the figures to follow")
            (node.root / "enough").touch()
            finished(process)
            until(lambda: survey([node.place]).past, "the verdict to be over")
            self.ended = survey([node.place])
            self.shown = list(lines(self.ended, time.time_ns()))
            self.lost_s = node.value("training_straggler_lost_time_seconds_total", rank="1")
            node.stop_agent()
            said = [
                {pair.key: pair.value.string_value for pair in each.attributes}
                for each in receiver.logs()
            ]
            self.states = [
                each["verdict.state"] for each in said if each.get("verdict") == "straggler"
            ]

    def _grown(self, node: Node) -> dict[str, Any] | None:
        verdict = straggler(node)
        assert verdict is not None, "over before its run"
        return verdict if verdict["evidence"]["excess_s"] > 0.03 else None


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


def test_a_verdict_that_grows_has_the_present_figures_and_no_further_record(seen: Seen) -> None:
    assert seen.first["evidence"]["excess_s"] < 0.03
    assert seen.last["since_ns"] == seen.first["since_ns"]
    assert seen.last["sentence"] != seen.first["sentence"]
    longer = re.search(r"takes (\S+) ms longer", seen.last["sentence"])
    assert longer is not None
    assert float(longer[1]) > 30
    assert seen.states == ["opened", "closed"]


def test_after_the_end_the_status_says_from_when_to_when_and_what_was_lost(seen: Seen) -> None:
    (past,) = seen.ended["past"]
    assert (past["kind"], past["who"]["rank"], past["phase"]) == ("straggler", "1", "data")
    assert past["since_ns"] == seen.last["since_ns"] < past["until_ns"]
    assert past["evidence"]["lost_s"] == pytest.approx(seen.lost_s, abs=0.01)
    assert {each["state"] for each in seen.ended["processes"]} == {"finished"}
    (line,) = [line for line in seen.shown if line.startswith("  - ")]
    assert re.match(r"  - (\S+ )?\d\d:\d\d:\d\d to (\S+ )?\d\d:\d\d:\d\d: rank 1 \(", line)
    assert line.endswith(" in total")
    assert " it was late in data, by " in line
