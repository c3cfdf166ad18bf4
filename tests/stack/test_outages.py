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
from trainings import Training

# Five seconds, in which an agent exports ten times.
OUTAGE_STEPS = 84
RANKS, BATCH = "0123", 4


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
        self.nodes = [Node(OTEL_DDP_NODE=name) for name in ("node-a", "node-b")]
        for node in self.nodes:
            life.enter_context(node)
            node.export_to(collector.http)
        training = Training(folder / "train", self.nodes)
        training.start(OTEL_DDP_GROUP="g", OTEL_DDP_RUN="r")
        until(lambda: self.prometheus.query("training_scalar"), "the first values in Prometheus")

        self.prometheus.kill()
        training.goes_on(OUTAGE_STEPS // 2)
        self._replaced(self.nodes[0])
        # While it still waits for Prometheus: what it has on its disk has to outlive this.
        collector.kill()
        training.goes_on(OUTAGE_STEPS // 2)
        self.prometheus.start()
        training.goes_on(OUTAGE_STEPS // 4)
        self._replaced(self.nodes[1])
        training.goes_on(OUTAGE_STEPS // 4)
        collector.start()
        for node in self.nodes:
            until(
                lambda node=node: node.agent()["export"].startswith("delivering"),
                "each node to deliver again",
            )
        training.goes_on(10)
        self.last = training.end()
        # What never arrives is for the tests to say.
        with suppress(AssertionError):
            until(lambda: self.count() >= self.last * len(RANKS), "all values in Prometheus")

    def count(self) -> float:
        """How many values Prometheus has."""
        found = self.prometheus.query('sum(count_over_time(training_scalar{name="samples"}[1h]))')
        return sum(each.value for each in found)

    def points(self, metric: str, rank: str) -> list[tuple[float, float]]:
        """Time and value of what Prometheus has of one series, in the order of its times."""
        (found,) = self.prometheus.raw(f'{metric}{{name="samples",rank="{rank}"}}[1h]')
        return found.points

    @staticmethod
    def _replaced(node: Node) -> None:
        """kill -9; a training process starts another one."""
        killed = node.kill_agent()
        until(lambda: node.place.agent_pid() not in (None, killed), "another agent")


@pytest.fixture(scope="module")
def launch(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with ExitStack() as life:
        yield Launch(binaries, tmp_path_factory.mktemp("outages"), life)


@pytest.mark.parametrize("rank", RANKS)
def test_nothing_that_was_logged_is_lost_and_nothing_is_there_twice(
    launch: Launch, rank: str
) -> None:
    values = launch.points("training_scalar", rank)
    steps = launch.points("training_scalar_step", rank)

    assert [step for _, step in steps] == [*range(1, launch.last + 1)]
    assert values == [(at_s, BATCH * step) for at_s, step in steps]


def test_counters_never_go_back(launch: Launch) -> None:
    # Also of those that a histogram consists of.
    counters = '{__name__=~".+_(total|count|sum|bucket)",run="r"}[1h]'
    found = launch.prometheus.raw(counters)

    assert {each.labels["rank"] for each in found if each.name == "training_steps_total"} == {
        *RANKS
    }
    # Threads have a count that is none: they come and go.
    gauges = {each.prometheus for each in METRICS if each.kind in (Kind.GAUGE, Kind.UPDOWN)}
    for series in found:
        values = [value for _, value in series.points]
        if series.name not in gauges:
            assert values == sorted(values), (series.name, series.labels)


def test_counters_come_to_what_the_ranks_have_done(launch: Launch) -> None:
    def told() -> dict[str, float]:
        found = launch.prometheus.query('training_steps_total{run="r"}')
        return {each.labels["rank"]: each.value for each in found}

    expected = dict.fromkeys(RANKS, float(launch.last))
    until(lambda: told() == expected, f"{launch.last} steps of each rank")
