"""Real trainings, agents, collector and Prometheus: which alerts fire, and which do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.stack.build import Binaries

from node import Node, until
from stack.faster import deployed
from stack.servers import CONFIGURATIONS, Collector, Prometheus
from stack.trainings import Training

NODES = ("node-a", "node-b")
LATE_RANK, HUNG_RANK = 3, 2


class Cluster:
    """Two nodes, whose runs are judged by the rules as they are deployed."""

    def __init__(self, binaries: Binaries, folder: Path, life: ExitStack) -> None:
        self._folder = folder
        config = deployed(folder / "rules")
        self.prometheus = life.enter_context(
            Prometheus(binaries, folder / "prometheus", config=yaml.safe_dump(config))
        )
        collector = life.enter_context(
            Collector(
                *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
                METRICS_URL=self.prometheus.otlp_metrics,
            )
        )
        self.nodes: dict[str, Node] = {}
        for name in NODES:
            settings = {"OTEL_DDP_NODE": name, "OTEL_DDP_STALL_TIMEOUT_S": "4"}
            # Its host is no part of the question, and a small one is busy.
            node = life.enter_context(Node(OTEL_DDP_SOURCES="none", **settings))
            node.env["OTEL_DDP_POSTMORTEM_DIR"] = str(node.root / "incidents")
            node.export_to(collector.http)
            self.nodes[name] = node

    def training(self, run: str) -> Training:
        return Training(self._folder / run, self.nodes, group="g", run=run, job_type="train")

    def firing(self) -> dict[str, dict[str, Any]]:
        """By name: the alerts that would wake somebody now."""
        alerts = self.prometheus.api("alerts")["alerts"]
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}

    def seen(self, run: str) -> set[str]:
        """Every alert about a run that has ever fired."""
        found = self.prometheus.query(
            f'count by (alertname) (last_over_time(ALERTS{{alertstate="firing",run="{run}"}}[1h]))'
        )
        return {each.labels["alertname"] for each in found}


def stopped_in(node: Node, rank: int, phase: str) -> int:
    """Stop a rank while it is in this phase; its process id."""

    def found() -> dict[str, Any]:
        return next(each for each in node.processes() if each["rank"] == rank)

    def there() -> bool:
        os.kill(pid, signal.SIGSTOP)
        if found()["phase"] == phase:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    pid = int(found()["pid"])
    until(there, f"rank {rank} in {phase}")
    return pid


@pytest.fixture
def cluster(binaries: Binaries, tmp_path: Path) -> Iterator[Callable[[], Cluster]]:
    with ExitStack() as life:
        yield lambda: Cluster(binaries, tmp_path, life)


def test_a_late_rank_fires_its_alert_and_a_clean_end_fires_none(
    cluster: Callable[[], Cluster],
) -> None:
    here = cluster()
    late, well = here.training("late"), here.training("well")
    # One after the other: four ranks are enough for a small machine.
    well.train()
    well.goes_on(300)
    well.end()

    late.train(late_rank=LATE_RANK, late_s=0.03)
    alert = until(lambda: here.firing().get("TrainingStraggler"), "the alert")
    late.end()

    labels = late.labels[LATE_RANK]
    assert labels.items() <= alert["labels"].items()
    assert alert["labels"]["phase"] == "data"
    assert f"Rank {LATE_RANK} on node {labels['node']}" in alert["annotations"]["description"]
    assert here.seen("late") == {"TrainingStraggler"}
    assert here.seen("well") == set()


def test_a_rank_that_is_stopped_in_the_collective_fires_the_stall_and_nothing_else(
    cluster: Callable[[], Cluster],
) -> None:
    here = cluster()
    training = here.training("hung")
    training.train()
    training.goes_on(150)
    name = training.labels[HUNG_RANK]["node"]
    # As far as the journals tell it waits like all the others.
    pid = stopped_in(here.nodes[name], HUNG_RANK, "comm_wait")
    try:
        alert = until(lambda: here.firing().get("TrainingStalled"), "the alert")
    finally:
        os.kill(pid, signal.SIGCONT)
    training.end()

    assert f"Held up by: {HUNG_RANK}@{name}." in alert["annotations"]["description"]
    assert here.seen("hung") == {"TrainingStalled"}
