"""Host and processes of a node: on both ways out, under the right labels, or left out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from node import Node, until
from otel_ddp.vocabulary import catalog
from otlp_receiver import Receiver

RANK = "import otel_ddp, sys; otel_ddp.init(); print('there', flush=True); sys.stdin.read()"
# Not every machine has these.
SELDOM = {"hw.network.io", "otel_ddp.host.pressure", "system.disk.io"}
OF_HOST = {
    metric.prometheus
    for metric in catalog.METRICS
    if metric.section == "Host" and metric.name not in SELDOM
}
OF_PROCESS = {metric.prometheus for metric in catalog.METRICS if metric.section == "Process"}


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(OTEL_DDP_RUN="r", OTEL_DDP_GROUP="g", OTEL_DDP_NODE="here") as node:
        yield node


def rank(node: Node, number: int, code: str = RANK, **env: str) -> subprocess.Popen[str]:
    started = node.python(
        code, RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", OTEL_DDP_AGENT="auto", **env
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "there\n"
    return started


def names(node: Node, /, **labels: str) -> set[str]:
    return {name for name, found, _ in node.scrape() if labels.items() <= found.items()}


def test_host_and_processes_are_told_of_on_both_ways(node: Node) -> None:
    with Receiver() as collector:
        node.export_to(collector.start_http())
        first = rank(node, 0, OTEL_DDP_STRATEGY="main")
        # Of another role, and of the same run.
        rank(node, 1, OTEL_DDP_STRATEGY="main", OTEL_DDP_JOB_TYPE="worker")
        run = {"group": "g", "run": "r", "node": "here"}

        until(lambda: names(node, **run) >= OF_HOST, "all that is told of the host")
        # Those whose training series stay at home as well: the node is watched as a whole.
        for number in ("0", "1"):
            theirs = {**run, "rank": number, "local_rank": number}
            until(lambda t=theirs: names(node, **t) >= OF_PROCESS, f"all of rank {number}")
        (resident,) = node.series("process_memory_usage_bytes", rank="0")
        assert resident[1] > 5e6
        assert {value for _, value in node.series("otel_ddp_source_errors_total")} == {0}
        assert not [labels for _, labels, _ in node.scrape() if labels.get("pid")]

        def sent() -> bool:
            arrived = {catalog.BY_NAME[each.metric].prometheus for each in collector.points()}
            return arrived >= OF_HOST | OF_PROCESS

        until(sent, "the same at the collector")
        for point in collector.points():
            if catalog.BY_NAME[point.metric].section == "Host":
                assert run.items() <= point.attributes.items()
                assert "rank" not in point.attributes
        assert first.poll() is None
