"""A run without a network keeps everything, and `otel-ddp replay` sends it from any copy."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from node import Node, finished, until
from otel_ddp.agent.export.exporter import OFFLINE_PREFIX
from otel_ddp.cli import main
from otlp_receiver import Receiver
from trainings import as_launched

STEPS = 500
TRAIN = """
import time
import otel_ddp
run = otel_ddp.init(group="g", run="away")
with run.span("setup"):
    run.event("began")
for step in range(500):
    run.log({"loss": step * 0.5}, step=step)
    time.sleep(0.001)
run.finish()
"""


class Kept(NamedTuple):
    """What an offline run left, copied to another place."""

    directory: Path
    status: str


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("gathered")
    with Node(OTEL_DDP_AGENT="offline") as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        ranks = [node.python(TRAIN, **as_launched(rank, 2, 2)) for rank in range(2)]
        first, second = map(finished, ranks)
        assert f"`otel-ddp replay {node.spool}` sends it later" in first
        assert second == ""
        until(
            lambda: [state for _, state in node.series("training_state")] == [2.0] * 2, "the ends"
        )
        until(lambda: "wait on disk" in node.agent()["export"], "what waits on disk")
        assert node.value("training_step", rank="1") == STEPS - 1
        status = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))
        node.stop_agent()

        # The next one sends. Of this run it knows at most how it ended.
        node.run("import otel_ddp; otel_ddp.init(run='later').finish()", OTEL_DDP_AGENT="auto")
        assert receiver.wait_for(lambda r: runs(r)["later"] > 0)
        assert [point for point in receiver.points() if point.metric == "training.scalar"] == []
        node.stop_agent()
        shutil.copytree(node.spool, folder / "copy")
    return Kept(folder / "copy", status)


def runs(receiver: Receiver) -> Counter[str]:
    """How many states were told of each run."""
    return Counter(
        point.attributes["run"] for point in receiver.points() if point.metric == "training.state"
    )


def assert_whole(receiver: Receiver) -> None:
    """Every value of both ranks is there once, in the order of its logging."""
    for rank in "01":
        points = [
            (point.time_ns, point.value)
            for point in receiver.points()
            if point.metric == "training.scalar" and point.attributes["rank"] == rank
        ]
        assert [value for _, value in sorted(points)] == [step * 0.5 for step in range(STEPS)]


def test_an_offline_agent_serves_the_node_and_says_what_waits(original: Kept) -> None:
    (spool,) = original.directory.glob(f"{OFFLINE_PREFIX}*")

    (export,) = (line for line in original.status.splitlines() if line.startswith("export"))
    assert re.match(r"export    offline: [0-9.]+ [kM]B wait on disk; ", export)
    assert export.endswith(f"/{spool.name}` sends them")


def test_what_was_kept_arrives_once_from_a_copy_and_replaying_it_again_sends_nothing(
    original: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    def replayed(endpoint: str, *options: str) -> str:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        status = main(["replay", str(original.directory), *options])
        said = "".join(capsys.readouterr())
        assert status == 0, said
        return said

    with Receiver() as receiver, Receiver() as another:
        endpoint = receiver.start_http()

        said = replayed(endpoint)

        assert_whole(receiver)
        assert runs(receiver)["away"] > 0
        assert sorted({span.name for span in receiver.spans()}) == ["run", "setup"]
        told = sorted(record.event_name for record in receiver.logs())
        assert told == ["began", "began"]
        count = len(receiver.requests)
        assert f"sent {count} requests to " in said

        said = replayed(endpoint)
        assert f"{count} requests were sent before and are left out (--again sends" in said
        assert f"sent 0 requests to {endpoint}" in said
        assert len(receiver.attempts) == count

        replayed(another.start_http(), "--again")
        assert_whole(another)
