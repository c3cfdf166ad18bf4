"""otel-ddp demo --check against the real collector and Prometheus, with our rules, faster ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tools.stack.build import Binaries

import leftovers
from cli.test_demo import begin
from node import Node
from stack.faster import deployed
from stack.servers import CONFIGURATIONS, Collector, Prometheus


@pytest.mark.stress
def test_a_late_rank_a_hang_and_a_death_are_seen_in_turn(
    binaries: Binaries, tmp_path: Path
) -> None:
    config = yaml.safe_dump(deployed(tmp_path / "rules"))
    with (
        Prometheus(binaries, tmp_path / "prometheus", config=config) as prometheus,
        Collector(
            *(binaries, tmp_path / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        ) as collector,
        Node() as node,
    ):
        node.export_to(collector.http)
        played = begin(node, "--check", prometheus.url)
        output, errors = played.communicate(timeout=1200)
        assert errors == ""
        assert leftovers.wait(leftovers.NODE, node.root.name) == {}
    assert (played.returncode, output.splitlines()[-1]) == (0, "3 of 3 alerts fired.")
