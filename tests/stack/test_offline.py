"""What was kept for hours arrives whole, beside what others send just now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.stack.build import Binaries

from node import until
from otel_ddp import settings
from otel_ddp.agent.export.folder import Queue
from otel_ddp.agent.export.otlp.render import Renderer
from otel_ddp.agent.export.otlp.transport import Transport
from otel_ddp.agent.ledger import Ledger
from otel_ddp.cli import main
from otel_ddp.vocabulary import catalog
from stack.servers import CONFIGURATIONS, Collector, Prometheus

S = 10**9
MINUTES = 90
# A value every three seconds, an export every minute.
VALUES = 20


def exported(node: str, values: int, ledger: Ledger, began_ns: int) -> None:
    labels = (("group", "g"), ("run", "r"), ("node", node), ("rank", "0"), ("name", "loss"))
    series = ledger.series(catalog.TRAINING_SCALAR, labels)
    for number in range(values):
        ledger.log(series, float(number), began_ns + number * 3 * S)
    ledger.put(catalog.TRAINING_STEPS, labels[:-1], 1.0, began_ns, began_ns - S)


def keep(directory: Path, node: str, began_ns: int) -> list[tuple[float, float]]:
    """The spool of a node that was offline since then; its points as Prometheus tells them."""
    queue, ledger = Queue(["metrics"], directory, 1 << 30), Ledger()
    renderer, ledger.keep_history = Renderer({"service.name": "otel-ddp"}), True
    for minute in range(MINUTES):
        now_ns = began_ns + minute * 60 * S
        exported(node, VALUES, ledger, now_ns)
        for made in renderer.metrics(ledger, now_ns + 59 * S):
            queue.add(made)
            queue.write("metrics")
    return [
        ((began_ns // 10**6 + (minute * 60 + number * 3) * 1000) / 1000, float(number))
        for minute in range(MINUTES)
        for number in range(VALUES)
    ]


@pytest.fixture
def prometheus(
    binaries: Binaries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Prometheus]:
    """Behind a collector to which everything goes."""
    with (
        Prometheus(binaries, tmp_path / "prometheus") as prometheus,
        Collector(
            *(binaries, tmp_path / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        ) as collector,
    ):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.http)
        yield prometheus


def test_two_nodes_that_were_offline_are_replayed_whole_and_twice_is_once(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    now_ns = time.time_ns()
    began_ns = now_ns - (MINUTES + 5) * 60 * S
    known = {
        node: keep(tmp_path / "kept" / f"offline-{node}", node, began_ns + number * S)
        for number, node in enumerate("ab")
    }

    def stored() -> dict[str, list[tuple[float, float]]]:
        found = prometheus.raw("training_scalar[3h]")
        return {each.labels["node"]: each.points for each in found}

    # What is too old is so by what is there already.
    ledger, transport = Ledger(), Transport(settings.read())
    ledger.keep_history = True
    exported("punctual", 1, ledger, now_ns)
    (value, _) = Renderer({"service.name": "otel-ddp"}).metrics(ledger, now_ns)
    assert transport.send("metrics", value.body).kind == "delivered"
    transport.close()
    until(lambda: "punctual" in stored(), "the value of just now")

    for again in ([], ["--again"]):
        assert main(["replay", f"{tmp_path}/kept", *again]) == 0
        until(lambda: {**stored(), **known} == stored(), "every value, once, at its time")
