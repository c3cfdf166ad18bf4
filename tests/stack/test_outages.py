"""One training on two nodes that goes on while Prometheus, collector and agents are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tools.stack.build import Binaries

from node import Node, until
from otel_ddp.vocabulary.catalog import METRICS, Kind
from stack.servers import CONFIGURATIONS, Collector, Prometheus
from stack.trainings import Training, assert_all_there, wait_for

# An agent that has tried in vain for so long tries again within 12 s.
OUTAGE_S = 10.0


class Launch:
    """A training, and what was killed meanwhile: each for long enough that its queue was needed."""

    def __init__(self, binaries: Binaries, folder: Path, life: ExitStack) -> None:
        self.prometheus = life.enter_context(Prometheus(binaries, folder / "prometheus"))
        collector = life.enter_context(
            Collector(
                *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
                METRICS_URL=self.prometheus.otlp_metrics,
            )
        )
        self.nodes = {name: Node(OTEL_DDP_NODE=name) for name in ("node-a", "node-b")}
        for node in self.nodes.values():
            life.enter_context(node)
            node.export_to(collector.http)
        self.training = Training(folder / "train", self.nodes)
        self.training.train()
        until(lambda: self.prometheus.query("training_scalar"), "the first values in Prometheus")

        self.prometheus.kill()
        self.training.goes_on_for(OUTAGE_S / 2)
        self._replaced("node-a")
        # While it still waits for Prometheus: what it has on its disk has to outlive this.
        collector.kill()
        self.training.goes_on_for(OUTAGE_S / 2)
        self.prometheus.start()
        self.training.goes_on_for(OUTAGE_S / 4)
        self._replaced("node-b")
        self.training.goes_on_for(OUTAGE_S / 4)
        collector.start()
        for name, node in self.nodes.items():
            until(
                lambda node=node: node.agent()["export"].startswith("delivering"),
                f"{name} to deliver again",
            )
        self.training.goes_on(10)
        self.training.end()
        # What never arrives is for the tests to say.
        with suppress(AssertionError):
            wait_for(self.prometheus, self.training)

    def _replaced(self, name: str) -> None:
        """kill -9; a training process starts another one."""
        node = self.nodes[name]
        killed = node.kill_agent()
        until(lambda: node.place.agent_pid() not in (None, killed), f"another agent on {name}")


@pytest.fixture(scope="module")
def launch(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with ExitStack() as life:
        yield Launch(binaries, tmp_path_factory.mktemp("outages"), life)


def test_nothing_that_was_logged_is_lost_and_nothing_is_there_twice(launch: Launch) -> None:
    assert_all_there(launch.prometheus, launch.training)


def test_counters_never_go_back(launch: Launch) -> None:
    # Also of those that a histogram consists of.
    counters = '{__name__=~".+_(total|count|sum|bucket)",run="r"}[1h]'
    found = launch.prometheus.raw(counters)

    assert {each.labels["rank"] for each in found if each.name == "training_steps_total"} == {
        str(rank) for rank in launch.training.labels
    }
    # Threads have a count that is none: they come and go.
    gauges = {each.prometheus for each in METRICS if each.kind in (Kind.GAUGE, Kind.UPDOWN)}
    for series in found:
        values = [value for _, value in series.points]
        if series.name not in gauges:
            assert values == sorted(values), (series.name, series.labels)


def test_counters_come_to_what_the_ranks_have_done(launch: Launch) -> None:
    steps = launch.training.steps()

    def told() -> dict[str, float]:
        found = launch.prometheus.query('training_steps_total{run="r"}')
        return {each.labels["rank"]: each.value for each in found}

    expected = {str(rank): float(steps) for rank in launch.training.labels}
    until(lambda: told() == expected, f"{steps} steps of each rank")
