"""A real Prometheus scrapes a node, as deploy/prometheus/scrape-file.yml has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tools.stack.build import Binaries

from node import Node, until
from stack.servers import DEPLOY, Prometheus
from trainings import Training


def test_a_scrape_has_each_rank_under_its_own_labels(binaries: Binaries, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    shutil.copy(DEPLOY / "prometheus" / "scrape-file.yml", tmp_path)
    config = "global: {scrape_interval: 1s}\nscrape_config_files: [scrape-file.yml]\n"
    with Node(OTEL_DDP_NODE="node-a") as node:
        training = Training(tmp_path / "train", [node])
        training.start(OTEL_DDP_GROUP="g", OTEL_DDP_RUN="r")
        address = until(node.agent, "the agent")["scrape"].split("/")[2]
        # With a label of the list's own, as launchers give: it must not take the place of ours.
        nodes = [{"targets": [address], "labels": {"node": "rack-7"}}]
        (tmp_path / "nodes" / "nodes.json").write_text(json.dumps(nodes))
        with Prometheus(binaries, tmp_path, config=config) as prometheus:
            until(
                lambda: len(prometheus.query("training_steps_total > 1")) == 2,
                "a scrape of all ranks",
            )
            found = prometheus.query("training_steps_total")

    run = {"group": "g", "run": "r", "job_type": "train", "node": "node-a"}
    assert [
        {name: text for name, text in each.labels.items() if name not in ("job", "instance")}
        for each in sorted(found, key=lambda each: each.labels["rank"])
    ] == [{**run, "rank": rank, "local_rank": rank} for rank in "01"]
