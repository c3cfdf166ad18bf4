"""Turns the records of one process into series, and into spans and events to export."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from otel_ddp import errors, plain
from otel_ddp.agent.ledger import Buckets, Labels, Ledger
from otel_ddp.agent.reading.documents import (
    SAMPLED_EVERY,
    StepSpans,
    context_of,
    label_text,
    run_span,
)
from otel_ddp.agent.reading.logged_values import LoggedValues, Summaries
from otel_ddp.agent.reading.process import News, Process
from otel_ddp.diagnosis.steps import Collective
from otel_ddp.journal.layout import SPAN
from otel_ddp.journal.parser import Document, Total
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STATES, UNUSUAL_PHASES

# Matches an exception class at the beginning of a failure's reason. It matches few reasons that
# users wrote themselves.
_ERROR = re.compile(r"([A-Z]\w{0,99})(?:: |$)")
# How many steps the mean of collectives per step covers. Only steps that recorded them count.
_LAST_STEPS = 8
# Metrics whose labels contain facts about one process. If the rank restarts, these series of its
# earlier process are dropped, since the facts may have changed.
_OF_ONE_PROCESS = (
    catalog.TRAINING_RUN_INFO,
    catalog.TRAINING_RUN_SETTING,
    catalog.OTEL_DDP_CAPABILITY,
    catalog.TRAINING_PHASE_STEP_TIME,
    catalog.TRAINING_COLLECTIVE_STEP_CALLS,
    catalog.TRAINING_COLLECTIVE_STEP_SIZE,
)
_OF_ARTIFACT = ("name", "type", "direction", "digest", "uri")


class Exports:
    """The series and the documents (spans and events) of one process. Callers hold the ledger's
    lock."""

    def __init__(
        self,
        reader: JournalReader,
        process: Process,
        ledger: Ledger,
        summaries: Summaries | None = None,
    ) -> None:
        """*summaries*: for each rank of the node, the lowest and highest value of each logged
        name."""
        self.reader, self.process = reader, process
        self.documents: list[Document] = []
        """Spans and events that wait for the export."""
        self.artifacts: dict[tuple[str, str], dict[str, Any]] = {}
        """The newest artifact for each name and direction, once its file was read or given up."""
        self.unread_artifacts = 0
        self._labels = process.labels
        self._ledger = ledger
        self._values = LoggedValues(reader, ledger, {} if summaries is None else summaries)
        self._step_times, self._step_spans = StepTimes(), StepSpans()
        self._has_run_span = False
        self._collectives = deque[Mapping[Collective, Sequence[int]]](maxlen=_LAST_STEPS)
        # For each metric whose series come and go, the labels of the series that exist now.
        self._shown: dict[catalog.Metric, set[Labels]] = {}

    @property
    def is_sent(self) -> bool:
        """Whether spans and log records are exported. Without a collector they are dropped."""
        return self.process.exported and self._ledger.keep_history

    def feed(self, process: Process) -> None:
        """Add the records that the last poll of the process has read."""
        self.process, labels, new = process, process.labels, process.new
        if not labels:
            return
        if labels != self._labels:
            if self._labels:
                self._ledger.drop(self._labels)
            self._shown.clear()
            # Drop the series of an earlier attempt of this rank.
            self._ledger.drop(labels, *_OF_ONE_PROCESS)
            self._values.relabel(labels)
            self._labels, process.extremes = labels, self._values.extremes
        self._collectives += [
            each.collectives for each in new.steps if each.collectives is not None
        ]
        self._values.restore(process.mark_before[0])
        for record in new.scalars:
            self._values.feed(record)
        if self.is_sent:
            self._add_documents(new)

    def _add_documents(self, new: News) -> None:
        process, reader = self.process, self.reader
        # Every n-th step and some slow steps get spans; if n is 0, only slow steps do.
        every = plain.whole(reader.facts.get("sample_steps"))
        every = SAMPLED_EVERY if every is None else every
        for step in new.steps:
            if spans := self._step_spans.spans(step, self._labels, every):
                spans[0]["link"] = context_of(reader)
                self.documents += [Document(SPAN, each, reader.position) for each in spans]
        self.documents += [*new.spans, *new.events]
        if not process.is_at_work and not self._has_run_span:
            self._has_run_span = True
            self.documents += run_span(reader, process.life.state, process.life.ended_ns)

    def take_documents(self) -> list[Document]:
        """Take the spans and events that were not exported yet."""
        taken, self.documents = self.documents, []
        return taken

    @errors.contained()
    def update_series(self, now_ns: int, *, is_newest: bool) -> None:
        """Update the series of the process.

        *is_newest*: false if a newer process has the same labels, such as a process of the next
        attempt. Only the newest process writes its series.
        """
        if self._labels and self.process.exported and is_newest:
            self._put_state(self.process.describe(), now_ns)
            self._put_totals(now_ns)
            self._put_collectives(now_ns)
            self._put_values(now_ns)
            self._put_artifacts(now_ns)

    def _put_state(self, process: ProcessState, now_ns: int) -> None:
        reader = self.reader
        single = {
            catalog.TRAINING_STATE: STATES[process.state],
            catalog.TRAINING_RESTARTS: reader.identity.get("restarts") or 0,
            catalog.TRAINING_WORLD_SIZE: process.world_size,
            catalog.TRAINING_STEP: process.step,
        }
        single[catalog.TRAINING_HEARTBEAT_TIMESTAMP] = (process.seen_alive_ns or 0) / 1e9
        if (progress := reader.progress()) is not None:
            since_ns = reader.created_ns + progress.phase_after_ns
            single[catalog.TRAINING_PHASE] = progress.phase_code
            single[catalog.TRAINING_PROGRESS_TIMESTAMP] = since_ns / 1e9
        for metric, value in single.items():
            if value is not None:
                self._put(metric, value, now_ns)
        if process.state == "failed" and (kind := _ERROR.match(process.reason)):
            self._put(catalog.TRAINING_EXCEPTIONS, 1, now_ns, ("error.type", kind[1]))
        for why, count in (
            ("overwritten", reader.lost),
            ("unreadable", reader.unreadable),
            ("too_fast", self._values.too_fast),
        ):
            self._put(catalog.OTEL_DDP_RECORDS_LOST, count, now_ns, ("why", why))
        able: dict[Labels, float] = {
            (("what", str(what)), ("reason", str(reason))): 0.0 if reason else 1.0
            for what, reason in plain.mapping(reader.facts.get("capability")).items()
        }
        self._put_all(catalog.OTEL_DDP_CAPABILITY, able, now_ns)
        if process.rank == 0:
            self._put_run(now_ns)

    def _put_values(self, now_ns: int) -> None:
        best: dict[Labels, float] = {}
        at_step: dict[Labels, float] = {}
        for (name, split), way, point in self._values.best():
            labels = ("name", name), ("split", split), ("direction", way)
            best[labels] = point.value
            if point.step is not None:
                at_step[labels] = point.step
        self._put_all(catalog.TRAINING_SCALAR_BEST, best, now_ns)
        self._put_all(catalog.TRAINING_SCALAR_BEST_STEP, at_step, now_ns)

    def _put_artifacts(self, now_ns: int) -> None:
        by_labels: dict[Labels, Mapping[str, Any]] = {}
        for each in self.artifacts.values():
            by_labels[tuple((word, label_text(each.get(word))) for word in _OF_ARTIFACT)] = each
        for metric, key, unit in (
            (catalog.TRAINING_ARTIFACT_TIMESTAMP, "time", 1e9),
            (catalog.TRAINING_ARTIFACT_SIZE, "size", 1),
            (catalog.TRAINING_ARTIFACT_STEP, "step", 1),
        ):
            known = {of: each[key] for of, each in by_labels.items() if each.get(key) is not None}
            self._put_all(metric, {of: value / unit for of, value in known.items()}, now_ns)

    def _put_totals(self, now_ns: int) -> None:
        totals = self.reader.totals()
        seconds = self._step_times.feed(totals, now_ns)
        per_step: dict[Labels, float] = {(("phase", each),): seconds[each] for each in seconds}
        self._put_all(catalog.TRAINING_PHASE_STEP_TIME, per_step, now_ns)
        for total in totals:
            metric = catalog.BY_NAME.get(total.metric)
            if metric is None:
                continue
            more = [(str(key), str(value)) for key, value in total.attributes.items()]
            if total.bounds is None:
                self._put(metric, total.values[0], now_ns, *more)
            elif len(total.bounds) == len(metric.bounds):
                self._put(metric, Buckets(total.values[1:], total.values[0]), now_ns, *more)

    def _put_collectives(self, now_ns: int) -> None:
        kinds = {kind for step in self._collectives for kind in step}
        for at, metric in enumerate(
            (catalog.TRAINING_COLLECTIVE_STEP_CALLS, catalog.TRAINING_COLLECTIVE_STEP_SIZE)
        ):
            means: dict[Labels, float] = {
                tuple(zip(catalog.COLLECTIVE, kind, strict=True)): fmean(
                    step[kind][at] if kind in step else 0 for step in self._collectives
                )
                for kind in kinds
            }
            self._put_all(metric, means, now_ns)

    def _put_run(self, now_ns: int) -> None:
        reader, described = self.reader, self.process.description
        self._put(catalog.TRAINING_RUN_START_TIMESTAMP, reader.created_ns / 1e9, now_ns)
        self._put_all(catalog.TRAINING_RUN_INFO, {described.info_labels(): 1}, now_ns)
        said = described.settings()
        now: dict[Labels, float] = {
            (("setting", setting), ("value", value)): 1 for setting, value in said.items()
        }
        self._put_all(catalog.TRAINING_RUN_SETTING, now, now_ns)

    def _put_all(self, metric: catalog.Metric, values: Mapping[Labels, float], now_ns: int) -> None:
        """Set these series of a metric, and remove all its other series."""
        for more in self._shown.get(metric, set()) - values.keys():
            self._ledger.forget(self._ledger.series(metric, (*self._labels, *more)))
        self._shown[metric] = set(values)
        for more, value in values.items():
            self._put(metric, value, now_ns, *more)

    def _put(
        self, metric: catalog.Metric, value: float | Buckets, now_ns: int, *more: tuple[str, str]
    ) -> None:
        self._ledger.put(
            metric,
            (*self._labels, *more),
            value if isinstance(value, Buckets) else float(value),
            now_ns,
            self.reader.created_ns,
            str(self.reader.identity.get("project") or ""),
        )


# -- the time per step in each phase, over the last two minutes

_WINDOW_NS = 120 * 10**9
# The totals are stored at this interval, so that a window has two dozen readings. The window may be
# longer than intended by one interval.
_KEEP_EVERY_NS = 5 * 10**9


class _Reading(NamedTuple):
    at_ns: int
    steps: float
    seconds: Mapping[tuple[str, str], float]
    """Total seconds by clock and phase."""


class StepTimes:
    """The mean time per step and phase of one process, from its totals now and two minutes ago."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def feed(self, totals: Iterable[Total], now_ns: int) -> dict[str, float]:
        """The seconds per step by phase; {} if no step has ended.

        The times are those of the device's clock if there is one: the host only launches the work
        and may run ahead of it.
        """
        now = _reading(totals, now_ns)
        readings = self._readings
        # Also drops readings that lie in the future, because the clock was set back.
        while readings and not 0 <= now_ns - readings[0].at_ns <= _WINDOW_NS + _KEEP_EVERY_NS:
            readings.popleft()
        before = readings[0] if readings else now
        if not readings or now_ns - readings[-1].at_ns >= _KEEP_EVERY_NS:
            readings.append(now)
        steps = now.steps - before.steps
        if steps <= 0:
            return {}
        grown = {
            key: seconds - before.seconds.get(key, 0.0) for key, seconds in now.seconds.items()
        }
        on_device = any(seconds > 0 for (clock, _), seconds in grown.items() if clock == "device")
        counts = "device" if on_device else "host"
        return {
            phase: seconds / steps
            for (clock, phase), seconds in grown.items()
            if clock == counts and (seconds > 0 or phase not in UNUSUAL_PHASES)
        }


def _reading(totals: Iterable[Total], now_ns: int) -> _Reading:
    steps, seconds = 0.0, dict[tuple[str, str], float]()
    for total in totals:
        if total.metric == catalog.TRAINING_STEPS.name:
            steps += total.values[0]
        elif total.metric == catalog.TRAINING_PHASE_TIME.name:
            key = (str(total.attributes.get("clock")), str(total.attributes.get("phase")))
            seconds[key] = seconds.get(key, 0.0) + total.values[0]
    return _Reading(now_ns, steps, seconds)
