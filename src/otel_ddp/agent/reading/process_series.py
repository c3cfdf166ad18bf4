"""The series of one process's state, progress and totals, and the info of its run."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from otel_ddp import catalog
from otel_ddp.agent.ledger import Buckets, Exemplar, Ledger, Series
from otel_ddp.agent.reading.run_info import info_labels, settings
from otel_ddp.agent.reading.step_times import StepTimes
from otel_ddp.agent.reading.steps import Step
from otel_ddp.journal.trace_ids import trace_id
from otel_ddp.words import STATES

if TYPE_CHECKING:
    from otel_ddp.agent.reading.journal_feed import JournalFeed

# The name of an exception class; a user's own reason for an end mostly does not match.
_ERROR = re.compile(r"([A-Z]\w{0,99})(?:: |$)")


class ProcessSeries:
    """One a process. The caller of every method holds the ledger's lock."""

    def __init__(self, journal: JournalFeed, ledger: Ledger) -> None:
        self._journal = journal
        self._ledger = ledger
        self._info_version = (-1, -1)
        self._info: Series | None = None
        self._settings: dict[str, str] = {}
        self._capabilities: set[tuple[str, str]] = set()
        self._step_times = StepTimes()
        self._phases: set[str] = set()
        # Of the duration of steps: bucket -> the last step in it that has a span.
        self._exemplars: dict[int, Exemplar] = {}

    def clear(self) -> None:
        """Begin anew: the ledger has dropped these series."""
        self._info = None
        self._info_version = (-1, -1)
        self._settings.clear()

    def exemplify(self, step: Step, span: Mapping[str, Any]) -> None:
        """This step has a span, and so stands for its bucket."""
        took_s = step.took_ns / 1e9
        bucket = bisect_left(catalog.TRAINING_STEP_DURATION.bounds, took_s)
        trace = trace_id(dict(self._journal.labels).get("run", ""), span["trace"])
        self._exemplars[bucket] = Exemplar(took_s, step.ended_ns, trace, bytes.fromhex(span["id"]))

    def update(self, now_ns: int) -> None:
        """Write what is true now into the ledger."""
        journal = self._journal
        reader, identity = journal.reader, journal.identity
        self._put(catalog.TRAINING_STATE, journal.state, now_ns)
        self._put(catalog.TRAINING_RESTARTS, float(identity.get("restarts") or 0), now_ns)
        if journal.world_size is not None:
            self._put(catalog.TRAINING_WORLD_SIZE, journal.world_size, now_ns)
        # A process that logs for a rank of another process does not show whether that one lives,
        # or what it does.
        if not journal.is_proxy:
            self._put(catalog.TRAINING_HEARTBEAT_TIMESTAMP, journal.seen_alive_ns / 1e9, now_ns)
            self._put_progress(now_ns)
        if (step := journal.step()) is not None:
            self._put(catalog.TRAINING_STEP, step, now_ns)
        if journal.state == STATES["failed"] and (kind := _ERROR.match(reader.reason())):
            self._put(catalog.TRAINING_EXCEPTIONS, 1, now_ns, ("error.type", kind[1]))
        if journal.last_epoch is not None:
            self._put(catalog.TRAINING_EPOCH, journal.last_epoch, now_ns)
        for why, count in (
            ("overwritten", reader.lost),
            ("unreadable", reader.unreadable),
            ("too_fast", journal.too_fast),
        ):
            self._put(catalog.OTEL_DDP_RECORDS_LOST, count, now_ns, ("why", why))
        self._put_totals(now_ns)
        self._put_capabilities(now_ns)
        if identity.get("global_rank") == 0 and not journal.is_proxy:
            self._put_run(now_ns)

    def _put_progress(self, now_ns: int) -> None:
        reader = self._journal.reader
        progress = reader.progress()
        if progress is not None:
            since_ns = reader.created_ns + progress.phase_after_ns
            self._put(catalog.TRAINING_PHASE, progress.phase_code, now_ns)
            self._put(catalog.TRAINING_PROGRESS_TIMESTAMP, since_ns / 1e9, now_ns)

    def _put_totals(self, now_ns: int) -> None:
        totals = self._journal.reader.totals()
        self._put_step_times(self._step_times.feed(totals, now_ns), now_ns)
        for total in totals:
            metric = catalog.BY_NAME.get(total.metric)
            if metric is None:
                continue
            more = [(str(key), str(value)) for key, value in total.attributes.items()]
            if total.bounds is None:
                self._put(metric, total.values[0], now_ns, *more)
            elif len(total.bounds) == len(metric.bounds):
                found = self._exemplars if metric is catalog.TRAINING_STEP_DURATION else {}
                buckets = Buckets(total.values[1:], total.values[0], found.copy())
                self._put(metric, buckets, now_ns, *more)

    def _put_step_times(self, seconds: dict[str, float], now_ns: int) -> None:
        for phase in self._phases - seconds.keys():
            labels = (*self._journal.labels, ("phase", phase))
            self._ledger.forget(self._ledger.series(catalog.TRAINING_PHASE_STEP_TIME, labels))
        self._phases = set(seconds)
        for phase, per_step_s in seconds.items():
            self._put(catalog.TRAINING_PHASE_STEP_TIME, per_step_s, now_ns, ("phase", phase))

    def _put_capabilities(self, now_ns: int) -> None:
        reasons = self._journal.reader.facts.get("capability")
        if not isinstance(reasons, dict):
            return
        now = {(str(what), str(reason)) for what, reason in reasons.items()}
        for what, reason in self._capabilities - now:
            labels = (*self._journal.labels, ("what", what), ("reason", reason))
            self._ledger.forget(self._ledger.series(catalog.OTEL_DDP_CAPABILITY, labels))
        self._capabilities = now
        for what, reason in now:
            value = 0.0 if reason else 1.0
            self._put(
                catalog.OTEL_DDP_CAPABILITY, value, now_ns, ("what", what), ("reason", reason)
            )

    def _put_run(self, now_ns: int) -> None:
        journal = self._journal
        reader = journal.reader
        self._put(catalog.TRAINING_RUN_START_TIMESTAMP, reader.created_ns / 1e9, now_ns)
        parameters = reader.facts.get("parameters")
        if isinstance(parameters, dict):
            for trainable, count in parameters.items():
                if isinstance(count, int):
                    pair = ("trainable", str(trainable))
                    self._put(catalog.TRAINING_PARAMETERS, count, now_ns, pair)
        version = (reader.identity_count, reader.definition_reads)
        if version != self._info_version or self._info is None:
            self._info_version = version
            if self._info is not None:
                self._ledger.forget(self._info)
            info = info_labels(journal.identity, reader.facts, reader.config)
            self._info = self._ledger.series(
                *(catalog.TRAINING_RUN_INFO, (*journal.labels, *info)),
                *(reader.created_ns, journal.project),
            )
        self._info.value, self._info.time_ns = 1.0, now_ns
        self._put_settings(now_ns)

    def _put_settings(self, now_ns: int) -> None:
        journal = self._journal
        described = journal.description
        texts, environment = described.texts(), described.environment()
        now = dict(settings(texts, environment, journal.reader.config))
        for setting, value in self._settings.items() - now.items():
            labels = (*journal.labels, ("setting", setting), ("value", value))
            self._ledger.forget(self._ledger.series(catalog.TRAINING_RUN_SETTING, labels))
        self._settings = now
        for setting, value in now.items():
            pairs = ("setting", setting), ("value", value)
            self._put(catalog.TRAINING_RUN_SETTING, 1, now_ns, *pairs)

    def _put(
        self, metric: catalog.Metric, value: float | Buckets, now_ns: int, *more: tuple[str, str]
    ) -> None:
        journal = self._journal
        self._ledger.put(
            metric,
            (*journal.labels, *more),
            value if isinstance(value, Buckets) else float(value),
            now_ns,
            journal.reader.created_ns,
            journal.project,
        )
