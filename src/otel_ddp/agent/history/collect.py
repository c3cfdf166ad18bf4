"""Collects from the agent what a history keeps: what was read, and what is known of each run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from otel_ddp import __version__
from otel_ddp.agent.history.histories import Histories
from otel_ddp.agent.history.kept_run import Batch, RunKey, Sample, State
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.history.tables import SeriesKey
from otel_ddp.journal.process_state import rank_key
from otel_ddp.journal.values import described
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind
from otel_ddp.vocabulary.words import RANK_LABELS

_SUMMARY_EVERY_S = 5.0
# Of a rank, beside its steps and phases, which have series.
_TOTALS = frozenset(
    metric.name
    for metric in (
        *(catalog.TRAINING_STEPS, catalog.TRAINING_STEPS_SKIPPED, catalog.TRAINING_SAMPLES),
        *(catalog.TRAINING_TOKENS, catalog.TRAINING_GC_TIME, catalog.TRAINING_FLOPS),
        *(catalog.TRAINING_OOMS, catalog.OTEL_DDP_HOOK_TIME, catalog.OTEL_DDP_HOOK_ERRORS),
    )
)

# What a person looks at; the others are on /metrics and in Prometheus.
_METRICS = (
    catalog.HW_GPU_UTILIZATION,
    catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION,
    catalog.HW_GPU_MEMORY_USAGE,
    catalog.HW_GPU_MEMORY_LIMIT,
    catalog.HW_POWER,
    catalog.HW_TEMPERATURE,
    catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY,
    catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE,
    catalog.TRAINING_CUDA_MEMORY_ALLOCATED,
    catalog.PROCESS_MEMORY_USAGE,
    catalog.PROCESS_CPU_TIME,
    catalog.SYSTEM_CPU_UTILIZATION,
    catalog.SYSTEM_MEMORY_USAGE,
    catalog.SYSTEM_MEMORY_LIMIT,
    catalog.SYSTEM_DISK_IO,
    catalog.SYSTEM_NETWORK_IO,
)


class Collector:
    """Called from the agent's loop."""

    def __init__(self, histories: Histories, ledger: Ledger, node: str) -> None:
        self._histories = histories
        self._ledger = ledger
        self._node = node
        # The role of the first process that was seen of a run.
        self._job_types: dict[RunKey, str] = {}
        self._summaries: dict[JournalFeed, tuple[float, list[dict[str, Any]]]] = {}

    def feed(self, feeds: Iterable[JournalFeed]) -> None:
        """What the last poll has read."""
        for each in feeds:
            if not each.labels:
                continue
            if any(each.new):
                key, rank = self._key_and_rank(each)
                names = each.reader.names
                self._histories.feed(Batch(key, rank, each.reader.path.name, names, each.new))

    def feed_states(
        self,
        feeds: Iterable[JournalFeed],
        verdicts: Sequence[Mapping[str, Any]],
    ) -> None:
        """What is known now. The caller holds the ledger's lock."""
        feeds = [each for each in feeds if each.labels]
        taken = list(_samples(self._ledger))
        states = {}
        for key in dict.fromkeys(self._key_and_rank(each)[0] for each in feeds):
            of_run = [each for each in feeds if self._key_and_rank(each)[0] == key]
            states[key] = self._state(key, of_run, verdicts, taken)
        self._histories.feed_states(states)
        self._summaries = {feed: each for feed, each in self._summaries.items() if feed in feeds}
        self._job_types = {key: each for key, each in self._job_types.items() if key in states}

    def _key_and_rank(self, feed: JournalFeed) -> tuple[RunKey, str]:
        labels = dict(feed.labels)
        key = labels["group"], labels["run"]
        job_type = labels["job_type"]
        of_run = self._job_types.setdefault(key, job_type)
        return key, rank_key(labels["rank"], job_type, of_run)

    def _state(
        self,
        key: RunKey,
        feeds: Sequence[JournalFeed],
        verdicts: Sequence[Mapping[str, Any]],
        taken: Sequence[Sample],
    ) -> State:
        ranks: dict[str, dict[str, Any]] = {}
        about: dict[str, Any] = {"group": key[0], "run": key[1], "job_type": self._job_types[key]}
        # The newest process of a rank describes it.
        for each in sorted(feeds, key=lambda e: e.reader.created_ns):
            totals = _totals(each)
            ranks[self._key_and_rank(each)[1]] = {**each.describe().to_json(), "totals": totals}
            if each.identity.get("global_rank") == 0:
                about |= self._about(each)
        own = [each for each in verdicts if _is_of(each, key)]
        alive = any(each.ended_at is None for each in feeds)
        if not alive:
            # An agent that comes later has not seen the run until now.
            about["seen_ns"] = max(each.life.ended_ns for each in feeds)
        here = [each for each in taken if each.run == key or (each.run is None and alive)]
        about |= {
            "node": self._node,
            "version": __version__,
            "began_ns": min(each.reader.created_ns for each in feeds),
            "cost": {"agent_cpu_s": round(time.process_time(), 1)},
        }
        return State(about, ranks, own, here)

    def _about(self, feed: JournalFeed) -> dict[str, Any]:
        return {
            "project": feed.project,
            "config": dict(feed.reader.config),
            "texts": feed.description.texts(),
            "environment": feed.description.environment(),
            "summary": self._summary(feed),
        }

    def _summary(self, feed: JournalFeed) -> list[dict[str, Any]]:
        now = time.monotonic()
        read_at, found = self._summaries.get(feed, (0.0, []))
        # It is a file: not read again each second, but once more at the end.
        if feed.ended_at is not None or not read_at or now - read_at > _SUMMARY_EVERY_S:
            found = described(feed.reader)
            self._summaries[feed] = now, found
        return found


def _totals(feed: JournalFeed) -> dict[str, float]:
    found: dict[str, float] = {}
    for total in feed.reader.totals():
        if total.metric in _TOTALS:
            found[total.metric] = found.get(total.metric, 0.0) + total.values[0]
    return found


def _is_of(verdict: Mapping[str, Any], key: RunKey) -> bool:
    who = verdict["who"]
    return (who.get("group"), who.get("run")) == key


def _samples(ledger: Ledger) -> Iterator[Sample]:
    """The readings as they are now. The caller holds the ledger's lock."""
    for metric, of_metric in ledger.of(_METRICS):
        kind = "counter" if metric.kind is Kind.COUNTER else "node"
        for series in of_metric:
            value = series.value
            if not isinstance(value, (int, float)):
                continue
            labels = dict(series.labels)
            run = (labels["group"], labels["run"]) if labels.get("run") else None
            more = tuple(pair for pair in series.labels if pair[0] not in RANK_LABELS)
            key = SeriesKey(kind, metric.name, labels.get("rank", ""), more)
            yield Sample(run, key, series.time_ns, float(value))
