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

TAKEN_OUT = "run:training_stalled:age"


def check(
    binaries: Binaries, folder: Path, *words: str, without: str = ""
) -> tuple[int, list[str]]:
    """The exit status and the lines of a check, which has ended and left no process."""
    config = deployed(folder / "rules")
    for path in (folder / "rules").glob("*.yml"):
        rules = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            group["rules"] = [each for each in group["rules"] if each.get("record") != without]
        path.write_text(yaml.safe_dump(rules))
    with (
        Prometheus(binaries, folder / "prometheus", config=yaml.safe_dump(config)) as prometheus,
        Collector(
            *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        ) as collector,
        Node() as node,
    ):
        node.export_to(collector.http)
        played = begin(node, "--check", prometheus.url, *words)
        output, errors = played.communicate(timeout=1200)
        assert errors == ""
        assert leftovers.wait(leftovers.NODE, node.root.name) == {}
    return played.returncode, output.splitlines()


@pytest.mark.stress
def test_a_late_rank_a_hang_and_a_death_are_seen_in_turn(
    binaries: Binaries, tmp_path: Path
) -> None:
    status, lines = check(binaries, tmp_path)

    assert (status, lines[-1]) == (0, "3 of 3 alerts fired.")


@pytest.mark.stress
def test_a_rule_that_was_taken_out_fails_the_check(binaries: Binaries, tmp_path: Path) -> None:
    status, lines = check(
        binaries, tmp_path, "--inject", "hang:1", "--seconds", "30", without=TAKEN_OUT
    )

    assert (status, lines[-1]) == (1, "0 of 1 alerts fired.")
    assert "TrainingStalled has found nothing: load deploy/prometheus/alerts and rules" in lines[1]
