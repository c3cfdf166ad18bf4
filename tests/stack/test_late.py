"""What comes too late to be stored takes nothing of anybody else's along."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tools.stack.build import Binaries

from node import until
from otel_ddp import settings
from otel_ddp.agent.export.otlp.transport import Transport
from otel_ddp.agent.export.render import Renderer
from otel_ddp.agent.ledger import Ledger
from otel_ddp.vocabulary import catalog
from stack.servers import CONFIGURATIONS, Collector, Prometheus

EXPORTS = 40
HOURS_NS = 3600 * 10**9


def request(node: str, number: int, time_ns: int) -> bytes:
    ledger = Ledger()
    labels = (("group", "g"), ("run", "r"), ("job_type", "train"), ("node", node), ("rank", "0"))
    ledger.put(catalog.TRAINING_STEPS, labels, float(number), time_ns, time_ns - 10**9)
    (made,) = Renderer({"service.name": "otel-ddp"}).metrics(ledger, time_ns)
    return bytes(made.body)


def test_points_that_are_too_old_cost_no_other_node_its_own(
    binaries: Binaries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Prometheus(binaries, tmp_path / "prometheus") as prometheus,
        Collector(
            *(binaries, tmp_path / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        ) as collector,
    ):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.http)
        transport = Transport(settings.read())
        began_ns = time.time_ns()

        def stored(node: str) -> float:
            chosen = f'training_steps_total{{node="{node}"}}'
            return sum(each.value for each in prometheus.query(f"count_over_time({chosen}[5m])"))

        # What is too old is so by what is there already.
        transport.send("metrics", request("punctual", 0, began_ns))
        until(lambda: stored("punctual") == 1, "the first")
        for number in range(1, EXPORTS + 1):
            # One agent finds its way after five hours, while another one is on time.
            now_ns = began_ns + number * 10**6
            for node, time_ns in (("late", now_ns - 5 * HOURS_NS), ("punctual", now_ns)):
                outcome = transport.send("metrics", request(node, number, time_ns))
                assert outcome.kind == "delivered", outcome.why
        transport.close()

        until(lambda: stored("punctual") == 1 + EXPORTS, "all that came in time")
