"""The load generator of docs/scale.md: what it claims to send is what arrives."""

from __future__ import annotations

import time
from pathlib import Path

from bench.fleet import NAMES, ONCE, RANKS, Fleet, lost, recorded
from tools.stack.build import Binaries

from node import until
from otel_ddp.vocabulary import catalog
from stack.servers import CONFIGURATIONS, Collector, Prometheus

NODES = 2
INTERVAL_S = 5.0
ROUNDS = 3


def test_what_a_fleet_claims_arrives(binaries: Binaries, tmp_path: Path) -> None:
    config = CONFIGURATIONS / "all-in-one.yaml"
    with (
        Prometheus(binaries, tmp_path / "prometheus") as prometheus,
        Collector(
            binaries, tmp_path / "collector", config, METRICS_URL=prometheus.otlp_metrics
        ) as collector,
    ):
        began_ns = time.time_ns() - int(ROUNDS * INTERVAL_S * 1e9)
        fleet = Fleet(NODES, collector.http, began_ns=began_ns, interval_s=INTERVAL_S)
        fleet.play(began_ns + int(ROUNDS * INTERVAL_S * 1e9), paced=False)
        fleet.close()
        last = f'count_over_time(training_heartbeat_timestamp_seconds{{node="node-{NODES - 1:04}"}}'
        until(
            lambda: (
                min((each.value for each in prometheus.query(last + "[5m])")), default=0) == ROUNDS
            ),
            "the last export of the last node",
        )

        assert not fleet.not_taken
        assert not lost(collector, prometheus)
        (stored,) = prometheus.query('count({__name__=~".+"})')
        assert stored.value == fleet.series
        logged = prometheus.query("count by (node, rank, local_rank) (training_scalar)")
        assert len(logged) == NODES * RANKS
        assert {each.value for each in logged} == {len(NAMES)}
        (gpus,) = prometheus.query("count(count by (hw_id) (hw_power_watts))")
        assert gpus.value == NODES * RANKS
        (infos,) = prometheus.query("count(training_run_info)")
        assert infos.value == 1


def test_the_recorded_series_are_the_catalogues() -> None:
    rows = recorded()

    for row in rows:
        metric = catalog.BY_NAME[row.metric]
        own = {key for key in row.attributes if not key.startswith("config_")}
        assert own <= set(metric.attributes), row
        # The sum of a histogram, and one bucket more than it has bounds.
        assert len(row.value) == len(row.per_s) == (len(metric.bounds) + 2 if metric.bounds else 1)
    assert {row.of for row in rows} == {"rank", "name", "gpu", "node", *ONCE}
    # No strategy leaves out what belongs to the node.
    assert all(row.always for row in rows if row.of in ("gpu", "node"))
