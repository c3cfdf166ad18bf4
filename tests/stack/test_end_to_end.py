"""Two nodes of two ranks each, their agents, the real collector, Prometheus: what comes out."""

from __future__ import annotations

import json
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tools.stack.build import Binaries

from node import Node, until
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus
from stack.trainings import Training

NODES = ("node-a", "node-b")
LATE_RANK = 3
SAMPLE_STEPS = 20
# Who brought a series to Prometheus: the collector, or the scrape.
BRINGERS = ("job", "instance")
# What each way adds by itself: about the resource, and about the scrape.
ADDED = {
    *("target_info", "up", "scrape_duration_seconds", "scrape_series_added"),
    *("scrape_samples_post_metric_relabeling", "scrape_samples_scraped"),
}


class Launch:
    """A run on two nodes; both ways to Prometheus, and the traces."""

    def __init__(self, binaries: Binaries, folder: Path, life: ExitStack) -> None:
        self._traces = folder / "traces.jsonl"
        self.pushed = life.enter_context(Prometheus(binaries, folder / "pushed"))
        collector = life.enter_context(
            Collector(
                *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
                METRICS_URL=self.pushed.otlp_metrics,
                TRACES_EXPORTER="file/traces",
                TRACES_FILE=str(self._traces),
            )
        )
        self.nodes: dict[str, Node] = {}
        for name in NODES:
            settings = {"OTEL_DDP_NODE": name, "OTEL_DDP_SAMPLE_STEPS": str(SAMPLE_STEPS)}
            self.nodes[name] = life.enter_context(Node(**settings))
            self.nodes[name].export_to(collector.http)

        self.training = Training(folder / "train", self.nodes, group="base", run="alpha")
        self.training.train(late_rank=LATE_RANK, late_s=0.03)
        self.scraped = life.enter_context(self._scraping(binaries, folder / "scraped"))
        # Some series are told only while a rank lives: a scrape has to find it alive.
        ranks = len(self.training.labels)
        until(lambda: len(self.scraped.query("training_stalled")) == ranks, "a scrape of all ranks")
        until(self._named, "the verdict on the late rank")
        self.training.goes_on(2 * SAMPLE_STEPS)
        # Series come and go: a run that begins changes the labels of its nodes' own. What never is
        # the same on both ways is for the test to say.
        with suppress(AssertionError):
            until(self._both_tell_the_same, "both ways to tell the same")
        self.training.end()

    def _scraping(self, binaries: Binaries, folder: Path) -> Prometheus:
        """As deploy/prometheus/scrape-file.yml has it, with the agents in its list of nodes."""
        (folder / "nodes").mkdir(parents=True)
        shutil.copy(DEPLOY / "prometheus" / "scrape-file.yml", folder)
        targets = [node.agent()["scrape"].split("/")[2] for node in self.nodes.values()]
        # With a label of the list's own, as launchers give: it must not take the place of ours.
        nodes = [{"targets": targets, "labels": {"node": "rack-7"}}]
        (folder / "nodes" / "nodes.json").write_text(json.dumps(nodes))
        config = "global: {scrape_interval: 1s}\nscrape_config_files: [scrape-file.yml]\n"
        return Prometheus(binaries, folder, config=config)

    def _named(self) -> bool:
        verdicts = self.nodes[self.training.labels[LATE_RANK]["node"]].told().verdicts
        return any(each["kind"] == "straggler" for each in verdicts)

    def _both_tell_the_same(self) -> bool:
        self.told_pushed, self.told_scraped = _told(self.pushed), _told(self.scraped)
        return {name for name, _ in self.told_pushed ^ self.told_scraped} <= ADDED

    def spans(self) -> set[tuple[str, str]]:
        """The trace and the span of each step."""
        lines = self._traces.read_text().splitlines(keepends=True)
        return {
            (span["traceId"], span["spanId"])
            for line in lines
            if line.endswith("\n")
            for of_resource in json.loads(line)["resourceSpans"]
            for of_scope in of_resource["scopeSpans"]
            for span in of_scope["spans"]
            if span["name"] == "step"
        }


@pytest.fixture(scope="module")
def launch(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with ExitStack() as life:
        yield Launch(binaries, tmp_path_factory.mktemp("launch"), life)


def _told(prometheus: Prometheus) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Name and labels of every series that is told at this time, or that was ever logged."""
    found = prometheus.query('last_over_time({__name__=~"training_scalar.*"}[1h])')
    # Not over the last seconds: what has ended is told no more, however it came.
    found += prometheus.query('{__name__=~".+",__name__!~"training_scalar.*"}')
    told = set()
    for each in found:
        labels = {name: value for name, value in each.labels.items() if name not in BRINGERS}
        if "le" in labels:
            # Prometheus writes the bound of a scraped bucket as 1.0, and that of a pushed one as 1.
            labels["le"] = repr(float(labels["le"]))
        told.add((each.name, frozenset(labels.items())))
    return told


def test_a_scraped_series_has_the_name_and_the_labels_of_a_pushed_one(launch: Launch) -> None:
    pushed, scraped = launch.told_pushed, launch.told_scraped

    assert [each for each in pushed ^ scraped if each[0] not in ADDED] == []
    assert {name for name, _ in pushed & scraped} >= {
        *("training_scalar", "training_steps_total", "training_step_duration_seconds_bucket"),
        *("training_straggler", "process_cpu_time_seconds_total", "otel_ddp_exports_total"),
        *("system_memory_usage_bytes",),
    }
    ranks = {key for labels in launch.training.labels.values() for key in labels.items()}
    assert ranks <= {
        label for name, labels in scraped if name == "training_step" for label in labels
    }


@pytest.mark.parametrize("way", ["pushed", "scraped"])
def test_buckets_of_the_steps_duration_lead_to_traces(launch: Launch, way: str) -> None:
    asked = urllib.parse.urlencode(
        {
            "query": 'training_step_duration_seconds_bucket{run="alpha",rank="0"}',
            "start": time.time() - 3600,
            "end": time.time(),
        }
    )
    found: list[dict[str, str]] = [
        exemplar["labels"]
        for series in getattr(launch, way).api(f"query_exemplars?{asked}")
        for exemplar in series["exemplars"]
    ]

    told = {(each["trace_id"], each["span_id"]) for each in found}
    assert told
    # Spans and metrics arrive in no order.
    until(lambda: told <= launch.spans(), "the spans of all of these")
