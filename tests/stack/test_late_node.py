"""A late node among two: from its agents' verdict to the alert, with all intervals as deployed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from tools.stack.build import Binaries

from node import Node, until
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus
from stack.trainings import Training

WITHIN_S = 90.0
DEPLOYED = DEPLOY / "prometheus"
HEALTHY_S = 15.0


def scraping(nodes: list[Node]) -> str:
    """The deployed configuration, with these agents to scrape."""
    config = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    config["rule_files"] = [str(DEPLOYED / each) for each in config["rule_files"]]
    targets = [urlsplit(node.agent()["scrape"]).netloc for node in nodes]
    found = {"job_name": "agents", "honor_labels": True, "static_configs": [{"targets": targets}]}
    return yaml.safe_dump({**config, "scrape_configs": [found]})


def firing(prometheus: Prometheus) -> list[tuple[dict[str, str], float]]:
    """The labels of each late rank or node, and when its alert began."""
    return [
        (alert["labels"], datetime.fromisoformat(alert["activeAt"][:19] + "+00:00").timestamp())
        for alert in prometheus.api("alerts")["alerts"]
        if alert["labels"]["alertname"] == "TrainingStraggler" and alert["state"] == "firing"
    ]


@pytest.mark.stress
def test_an_alert_names_a_late_node_of_two_within_90_s_pushed_and_scraped(
    binaries: Binaries, tmp_path: Path
) -> None:
    with ExitStack() as life:
        pushed = Prometheus(binaries, tmp_path / "pushed", config=DEPLOYED / "prometheus.yml")
        life.enter_context(pushed)
        collector = Collector(
            *(binaries, tmp_path / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=pushed.otlp_metrics,
        )
        life.enter_context(collector)
        of_agents = {"OTEL_METRIC_EXPORT_INTERVAL": "5000"}
        nodes = {name: Node(OTEL_DDP_NODE=name, **of_agents) for name in ("node-a", "node-b")}
        for node in nodes.values():
            life.enter_context(node)
            node.export_to(collector.http)
        training = Training(tmp_path / "train", nodes, group="g", run="r", job_type="train")
        training.train(step_s=0.055)
        scraped = Prometheus(binaries, tmp_path / "scraped", config=scraping(list(nodes.values())))
        life.enter_context(scraped)
        both = (pushed, scraped)
        until(
            lambda: all(each.query("count(training_compared_ranks == 4) == 2") for each in both),
            "the lead to compare all ranks",
        )
        training.goes_on_for(HEALTHY_S)
        before = [firing(each) for each in both]
        began_s = time.time()
        training.make_late(2, 3, late_s=0.02)
        until(lambda: all(firing(each) for each in both), "both to name the node")
        found = [firing(each) for each in both]
        training.end()

    assert before == [[], []]
    labels = {
        "alertname": "TrainingStraggler",
        "severity": "warning",
        "phase": "data",
        "group": "g",
        "run": "r",
        "node": "node-b",
    }
    assert [[each for each, _ in alerts] for alerts in found] == [[labels], [labels]]
    for ((_, since_s),) in found:
        assert since_s - began_s < WITHIN_S
