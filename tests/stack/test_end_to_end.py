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
from typing import Any

import pytest
from tools.stack.build import Binaries

from node import Node, until
from otel_ddp.vocabulary.words import RANK_LABELS
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus
from stack.trainings import Training, assert_all_there, selector, wait_for

NODES = ("node-a", "node-b")
LATE_RANK = 3
SAMPLE_STEPS = 20
# What the scripts log.
NAMES = ("loss", "rate")
# Who brought a series to Prometheus: the collector, or the scrape.
BRINGERS = ("job", "instance")
# What each way adds by itself: about the resource, and about the scrape.
ADDED = {
    *("target_info", "up", "scrape_duration_seconds", "scrape_series_added"),
    *("scrape_samples_post_metric_relabeling", "scrape_samples_scraped"),
}


class Launch:
    """Two runs of two groups on the same two nodes; both ways to Prometheus, and the files."""

    def __init__(self, binaries: Binaries, folder: Path, life: ExitStack) -> None:
        self._traces, self._logs = folder / "traces.jsonl", folder / "logs.jsonl"
        self.pushed = life.enter_context(Prometheus(binaries, folder / "pushed"))
        collector = life.enter_context(
            Collector(
                *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
                METRICS_URL=self.pushed.otlp_metrics,
                TRACES_EXPORTER="file/traces",
                TRACES_FILE=str(self._traces),
                LOGS_EXPORTER="file/logs",
                LOGS_FILE=str(self._logs),
            )
        )
        self.nodes: dict[str, Node] = {}
        for name in NODES:
            settings = {"OTEL_DDP_NODE": name, "OTEL_DDP_SAMPLE_STEPS": str(SAMPLE_STEPS)}
            self.nodes[name] = life.enter_context(Node(**settings))
            self.nodes[name].export_to(collector.http)

        self.train = Training(
            folder / "train", self.nodes, group="base", run="alpha", job_type="train"
        )
        self.eval = Training(
            folder / "eval", self.nodes, group="tuned", run="beta", job_type="eval"
        )
        self.train.train(late_rank=LATE_RANK, late_s=0.03)
        self.scraped = life.enter_context(self._scraping(binaries, folder / "scraped"))
        self.eval.log(100)
        # Some series are told only while a rank lives: a scrape has to find it alive.
        ranks = sum(len(each.labels) for each in self.trainings)
        until(lambda: len(self.scraped.query("training_stalled")) == ranks, "a scrape of all ranks")
        until(self._named, "the verdict on the late rank")
        self.train.goes_on(2 * SAMPLE_STEPS)
        # Series come and go: a run that begins changes the labels of its nodes' own. What never is
        # the same on both ways is for the test to say.
        with suppress(AssertionError):
            until(self._both_tell_the_same, "both ways to tell the same")
        for each in self.trainings:
            each.end()
        # And so is what never arrives.
        with suppress(AssertionError):
            wait_for(self.pushed, *self.trainings)

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
        verdicts = self.nodes[self.train.labels[LATE_RANK]["node"]].agent()["verdicts"]
        return any(each["kind"] == "straggler" for each in verdicts)

    def _both_tell_the_same(self) -> bool:
        self.told_pushed, self.told_scraped = _told(self.pushed), _told(self.scraped)
        return {name for name, _ in self.told_pushed ^ self.told_scraped} <= ADDED

    @property
    def trainings(self) -> list[Training]:
        return [self.train, self.eval]

    def spans(self) -> list[dict[str, Any]]:
        return _flat(self._traces, "resourceSpans", "scopeSpans", "spans")

    def records(self) -> list[dict[str, Any]]:
        return _flat(self._logs, "resourceLogs", "scopeLogs", "logRecords")


def _flat(path: Path, *levels: str) -> list[dict[str, Any]]:
    """What a file of the collector holds, without its resources and scopes."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    for level in levels:
        found = [each for outer in found for each in outer[level]]
    return [{**each, "attributes": _attributes(each)} for each in found]


def _attributes(each: dict[str, Any]) -> dict[str, str]:
    return {pair["key"]: str(*pair["value"].values()) for pair in each["attributes"]}


@pytest.fixture(scope="module")
def launch(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with ExitStack() as life:
        yield Launch(binaries, tmp_path_factory.mktemp("launch"), life)


def test_every_value_is_there_once_with_its_own_time_and_step(launch: Launch) -> None:
    assert_all_there(launch.pushed, launch.trainings)


@pytest.mark.parametrize("label", RANK_LABELS)
def test_each_label_filters_and_groups(launch: Launch, label: str) -> None:
    counted = {
        _key(labels): len(known) for each in launch.trainings for labels, known in each.series()
    }
    by_value: dict[str, dict[frozenset[tuple[str, str]], int]] = {}
    for key, count in counted.items():
        by_value.setdefault(dict(key)[label], {})[key] = count
    assert len(by_value) > 1

    for value, expected in by_value.items():
        chosen = selector("training_scalar", {label: value})
        found = launch.pushed.query(f"count_over_time({chosen}[1h])")
        assert {_key(each.labels): each.value for each in found if _ours(each.labels)} == expected

    grouped = launch.pushed.query(
        f'sum by ({label}) (count_over_time(training_scalar{{name=~"{"|".join(NAMES)}"}}[1h]))'
    )
    assert {each.labels[label]: each.value for each in grouped} == {
        value: sum(counts.values()) for value, counts in by_value.items()
    }


def _ours(labels: dict[str, str]) -> bool:
    """Not what the hooks log beside what the script logs."""
    return labels["name"] in NAMES


def _key(labels: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, labels[name]) for name in (*RANK_LABELS, "name"))


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
    ranks = {key for labels in launch.train.labels.values() for key in labels.items()}
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

    def has_all_steps() -> bool:
        spans = launch.spans()
        return told <= {(e["traceId"], e["spanId"]) for e in spans if e["name"] == "step"}

    # Spans and metrics arrive in no order.
    until(has_all_steps, "the spans of all of these")


def test_the_verdict_on_a_late_rank_arrives_as_a_log_record(launch: Launch) -> None:
    late = launch.train.labels[LATE_RANK]

    def opened() -> list[dict[str, Any]]:
        return [
            each
            for each in launch.records()
            if each["attributes"].get("verdict") == "straggler"
            and each["attributes"]["verdict.state"] == "opened"
        ]

    (record,) = until(opened, "the record")

    assert (record["eventName"], record["severityText"]) == ("training.straggler", "WARN")
    assert record["attributes"].items() >= {**late, "phase": "data"}.items()
    assert record["body"]["stringValue"].startswith(f"rank {LATE_RANK} ({late['node']}) ")
