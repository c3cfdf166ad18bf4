"""Takes one process's journal into the ledger."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import MS, Buckets, Labels, Ledger, Series
from otel_ddp.agent.reading import process_status
from otel_ddp.agent.reading.run_info import ConfigRecords, info_labels
from otel_ddp.agent.reading.series_times import ALL, SeriesTimes
from otel_ddp.agent.reading.step_spans import StepSpans, sampled_every
from otel_ddp.agent.reading.steps import Step, StepStream
from otel_ddp.agent.reading.workers import is_proxy, was_ended
from otel_ddp.catalog import STATES
from otel_ddp.journal.layout import END, SPAN
from otel_ddp.journal.place import lock_holder
from otel_ddp.journal.reader import Document, JournalReader, ProgressRecord, Record, Scalars, Steps

# A process that waits for its process group keeps its provisional name off the wire this long.
_UNSETTLED_S = 60.0
# What a class of exceptions looks like, and a reason of the user's own mostly does not.
_ERROR = re.compile(r"([A-Z]\w{0,99})(?:: |$)")

# How long before it is read a value may have been logged that is the next one of its name.
_OLDEST_NEW_NS = 10**9


class _Entry(NamedTuple):
    """The series of one logged name."""

    value: Series
    step: Series
    epoch: Series


def journal_alone_shows(journal: JournalFeed) -> bool | None:
    """Whether its parent ended this process, as far as its journal shows that."""
    return was_ended(journal.reader)


class JournalFeed:
    """One journal's way into the ledger."""

    def __init__(
        self,
        reader: JournalReader,
        ledger: Ledger,
        name_node: Callable[[dict[str, Any]], str],
        parent_ended: Callable[[JournalFeed], bool | None] = journal_alone_shows,
    ) -> None:
        """*parent_ended*: whether its parent has ended this one, which is gone without a word;
        None where that is not known yet."""
        self.reader: JournalReader = reader
        # As we see it, which is not as it sees itself where it is in a container and we are not;
        # 0 where we cannot: its own number may be a stranger's here.
        holder = lock_holder(reader.path)
        self.pid = reader.pid if holder is None else holder
        self.labels: Labels = ()
        self.state = STATES["starting"]
        self.ended_at: float | None = None
        self.seen_alive_ns = reader.created_ns
        self.gone_ns = 0
        self.last_step: int | None = None
        self.last_epoch: float | None = None
        self.documents: list[Document] = []
        self._ledger = ledger
        self._name_node = name_node
        self._parent_ended = parent_ended
        self._was_ended: bool | None = None
        self._known_identities = -1
        self._info_of: tuple[int, int] = (-1, -1)
        self._info: Series | None = None
        self._config = ConfigRecords()
        self._entries: dict[int, _Entry] = {}
        self._restored = False
        self._times = SeriesTimes(reader)
        self._times_found = self._times.found()
        # Names that have a point so late that their next value may meet it.
        self._late: set[int] = set()
        self._too_fast = 0
        self._capabilities: set[tuple[str, str]] = set()
        self._steps = StepStream(reader.created_ns)
        self._step_spans = StepSpans()
        self._new_steps: list[Step] = []

    # -- who it is

    @property
    def identity(self) -> dict[str, Any]:
        return self.reader.identity

    @property
    def world_size(self) -> int | None:
        """How many ranks train together with this one, where that is known."""
        size = self.identity.get("world_size")
        return size if isinstance(size, int) else None

    @property
    def restarted(self) -> bool:
        """Whether a launcher has started it again."""
        return bool(self.identity.get("restarts"))

    @property
    def exported(self) -> bool:
        """Whether the strategy lets this process's series leave the node."""
        return bool(self.identity.get("exported"))

    @property
    def is_proxy(self) -> bool:
        """Whether another process logs for this rank."""
        return is_proxy(self.reader)

    @property
    def project(self) -> str:
        return str(self.identity.get("project") or "")

    def settled(self) -> bool:
        """Whether it knows who it is, or will not learn it any more."""
        if self.identity.get("settled"):
            return True
        age_s = (time.time_ns() - self.reader.created_ns) / 1e9
        return self.ended_at is not None or age_s > _UNSETTLED_S or self.reader.used() > 0.5

    def _label(self) -> None:
        if self._known_identities == self.reader.identities:
            return
        self._known_identities = self.reader.identities
        labels = rank_labels(self.identity, self._name_node(self.identity), self.reader.pid)
        if labels != self.labels:
            self.forget()
            self.labels = labels
            self._restored = False

    def forget(self) -> None:
        """Take everything of this process out of the ledger."""
        if self.labels:
            self._ledger.drop(self.labels)
        self._entries.clear()
        self._late.clear()
        self._info = None
        self._info_of = (-1, -1)

    # -- reading

    def poll(self, now_ns: int, alive: bool) -> None:
        """Read what is new. The caller holds the ledger's lock."""
        self.reader.refresh()
        if alive:
            self.seen_alive_ns = now_ns
        progress = self.reader.progress()
        self._update_state(progress, alive)
        if not self.settled():
            return
        self._label()
        if not self._restored:
            self._restore()
        before, lost = self.reader.position, self.reader.lost
        records = self.reader.read()
        if self.reader.lost > lost:
            records = self._rescued(before, records) + records
        for record in records:
            if isinstance(record, Scalars):
                self._scalars(record, now_ns)
            elif isinstance(record, Steps):
                self._take_steps(record)
            elif record.kind == END:
                # It may have ended after we looked at its progress.
                self._update_state(self.reader.progress(), alive)
            elif self._sent:
                self.documents.append(record)
        if self._sent and self.identity.get("global_rank") == 0:
            self.documents += self._config.fresh(self.reader, now_ns)
        if self._late:
            self._keep_times(now_ns)

    @property
    def _sent(self) -> bool:
        # Nobody fetches documents where there is no collector: they would pile up.
        return self.exported and self._ledger.keep_history

    @containment.contained()
    def _take_steps(self, record: Steps) -> None:
        steps = self._steps.feed(record)
        self._new_steps += steps
        if not self._sent:
            return
        every = sampled_every(self.reader.facts)
        for step in steps:
            for content in self._step_spans.spans(step, self.labels, every):
                self.documents.append(Document(SPAN, content, record.position))

    def new_steps(self) -> list[Step]:
        """The steps that were read since the last time."""
        steps, self._new_steps = self._new_steps, []
        return steps

    def _rescued(self, before: int, records: list[Record]) -> list[Record]:
        """Of what was overwritten, the last value of each name: a copy of it is kept apart."""
        first = records[0].position if records else self.reader.position
        found: list[Record] = [
            record for record in self.reader.latest() if before <= record.position < first
        ]
        self.reader.lost -= len(found)
        return found

    def _update_state(self, progress: ProgressRecord | None, alive: bool) -> None:
        said = None if progress is None else progress.state
        self.state = process_status.state_of(said, alive)
        if self.state == STATES["killed"]:
            if self._was_ended is None:
                self._was_ended = self._parent_ended(self)
            if self._was_ended is None:
                # Nothing is told of its end before it is known what it was.
                self.state = process_status.state_of(said, alive=True)
            elif self._was_ended:
                self.state = STATES["finished"]
        if self.state in process_status.ENDED and self.ended_at is None:
            self.ended_at = time.monotonic()

    def _restore(self) -> None:
        # What an earlier agent has exported is not sent again, but stays to be seen.
        self._restored = True
        for record in self.reader.latest():
            if record.position < self.reader.position:
                self._scalars(record, None)
        found, self._times_found = self._times_found, {}
        for number in self.reader.names if ALL in found else found:
            if self.exported and (entry := self._enter(number)) is not None:
                at = found.get(number, found.get(ALL, 0))
                entry.value.time_ns = max(entry.value.time_ns, at)

    def _keep_times(self, now_ns: int) -> None:
        until = {number: self._entries[number].value.time_ns for number in self._late}
        if self.reader.drained():
            # What is still to come was logged by now, or a little before: values of a device.
            until = {each: at for each, at in until.items() if at + _OLDEST_NEW_NS > now_ns}
        self._late = set(until)
        if until and self._sent:
            self._times.keep(self.reader.position, until)

    def _scalars(self, record: Scalars, now_ns: int | None) -> None:
        """*now_ns*: when it was read; None where it is not to be sent, only to be shown."""
        step, epoch = record.step, record.epoch
        if step is not None:
            self.last_step = step
        if epoch is not None:
            self.last_epoch = epoch
        if not self.exported:
            return
        too_fast: int | None = None
        for number, value in record.values:
            entry = self._entries.get(number)
            if entry is None:
                entry = self._enter(number)
                if entry is None:
                    continue
            if now_ns is not None:
                at = self._log(entry, value, record)
                if at is None:
                    too_fast = number
                elif at > record.time_ns or at + MS > now_ns:
                    self._late.add(number)
                continue
            for series, seen in ((entry.value, value), (entry.step, step), (entry.epoch, epoch)):
                if seen is not None and record.time_ns >= series.time_ns:
                    series.value, series.time_ns = float(seen), record.time_ns
        if too_fast is not None and self._sent:
            self._leave_out(self.reader.names[too_fast].text)

    def _log(self, entry: _Entry, value: float, record: Scalars) -> int | None:
        """At what time the value stands now; None where it is the last one seen, and no point."""
        ledger, step, epoch = self._ledger, record.step, record.epoch
        at = ledger.log(entry.value, value, record.time_ns)
        if at is None:
            if step is not None:
                entry.step.value = float(step)
            if epoch is not None:
                entry.epoch.value = epoch
            return None
        if step is not None:
            ledger.log(entry.step, float(step), at)
        if epoch is not None:
            ledger.log(entry.epoch, epoch, at)
        return at

    def _leave_out(self, name: str) -> None:
        self._too_fast += 1
        who = dict(self.labels)
        containment.warn_once(
            f"too fast: {who['run']}",
            "rank %s logs %r more often than a thousand times a second, or its clock was set back: "
            "its points stand a millisecond apart at least and are a minute late by now, so what "
            "comes faster is left out and counted (otel_ddp_records_lost_total, "
            'why="too_fast"). Log fewer of them, or a mean of several.',
            *(who["rank"], name),
        )

    def _enter(self, number: int) -> _Entry | None:
        name = self.reader.names.get(number)
        if name is None:
            return None  # its definition was not readable: no value without a name
        labels = (*self.labels, ("name", name.text), ("split", name.split))
        start_ns, project = self.reader.created_ns, self.project
        made = [
            self._ledger.series(metric, labels, start_ns, project)
            for metric in (
                catalog.TRAINING_SCALAR,
                catalog.TRAINING_SCALAR_STEP,
                catalog.TRAINING_SCALAR_EPOCH,
            )
        ]
        nonfinite = self._ledger.series(catalog.TRAINING_NONFINITE, labels, start_ns, project)
        if nonfinite.value is None:
            # So that the first event is an increase, for every name although few ever need it:
            # a scrape fetches, so a 0 that is made together with the first event may never be
            # seen, and without one before it Prometheus' increase() takes the event for none.
            nonfinite.value = 0.0
        entry = self._entries[number] = _Entry(*made)
        return entry

    # -- what stands rather than flows

    def update_series(self, now_ns: int, is_newest: bool) -> None:
        """Bring the series of state and totals up to date. The caller holds the ledger's lock.

        *is_newest* is false for a process that another one with the same labels has replaced: of a
        parent and the child that became rank 0, or of two attempts, the newest speaks.
        """
        if not self.labels or not self.exported or not is_newest:
            return
        progress = self.reader.progress()
        self._put(catalog.TRAINING_STATE, self.state, now_ns)
        self._put(catalog.TRAINING_RESTARTS, float(self.identity.get("restarts") or 0), now_ns)
        if self.world_size is not None:
            self._put(catalog.TRAINING_WORLD_SIZE, self.world_size, now_ns)
        # What another process logs for a rank says nothing of whether that rank lives, or where
        # it stands.
        if not self.is_proxy:
            self._put(catalog.TRAINING_HEARTBEAT_TIMESTAMP, self.seen_alive_ns / 1e9, now_ns)
        if progress is not None and not self.is_proxy:
            since_ns = self.reader.created_ns + progress.phase_after_ns
            self._put(catalog.TRAINING_PHASE, progress.phase_code, now_ns)
            self._put(catalog.TRAINING_PROGRESS_TIMESTAMP, since_ns / 1e9, now_ns)
        if (step := self.step()) is not None:
            self._put(catalog.TRAINING_STEP, step, now_ns)
        if self.state == STATES["failed"] and (kind := _ERROR.match(self.reader.reason())):
            self._put(catalog.TRAINING_EXCEPTIONS, 1, now_ns, ("error.type", kind[1]))
        if self.last_epoch is not None:
            self._put(catalog.TRAINING_EPOCH, self.last_epoch, now_ns)
        self._put(catalog.OTEL_DDP_RECORDS_LOST, self.reader.lost, now_ns, ("why", "overwritten"))
        self._put(
            catalog.OTEL_DDP_RECORDS_LOST, self.reader.unreadable, now_ns, ("why", "unreadable")
        )
        self._put(catalog.OTEL_DDP_RECORDS_LOST, self._too_fast, now_ns, ("why", "too_fast"))
        self._put_totals(now_ns)
        self._put_capabilities(now_ns)
        if self.identity.get("global_rank") == 0 and not self.is_proxy:
            self._put_run(now_ns)

    def step(self) -> int | None:
        """The last step that the process spoke of."""
        progress = self.reader.progress()
        steps = [self.last_step, None if progress is None else progress.step]
        return max((step for step in steps if step is not None), default=None)

    def _put(
        self, metric: catalog.Metric, value: float | Buckets, now_ns: int, *more: tuple[str, str]
    ) -> None:
        self._ledger.put(
            metric,
            (*self.labels, *more),
            value if isinstance(value, Buckets) else float(value),
            now_ns,
            self.reader.created_ns,
            self.project,
        )

    def _put_totals(self, now_ns: int) -> None:
        for total in self.reader.totals():
            metric = catalog.BY_NAME.get(total.metric)
            if metric is None:
                continue
            more = [(str(key), str(value)) for key, value in total.attributes.items()]
            if total.bounds is None:
                self._put(metric, total.values[0], now_ns, *more)
            elif len(total.bounds) == len(metric.bounds):
                self._put(metric, Buckets(total.values[1:], total.values[0]), now_ns, *more)

    def _put_capabilities(self, now_ns: int) -> None:
        said = self.reader.facts.get("capability")
        if not isinstance(said, dict):
            return
        now = {(str(what), str(reason)) for what, reason in said.items()}
        for what, reason in self._capabilities - now:
            labels = (*self.labels, ("what", what), ("reason", reason))
            self._ledger.forget(self._ledger.series(catalog.OTEL_DDP_CAPABILITY, labels))
        self._capabilities = now
        for what, reason in now:
            value = 0.0 if reason else 1.0
            self._put(
                catalog.OTEL_DDP_CAPABILITY, value, now_ns, ("what", what), ("reason", reason)
            )

    def _put_run(self, now_ns: int) -> None:
        self._put(catalog.TRAINING_RUN_START_TIMESTAMP, self.reader.created_ns / 1e9, now_ns)
        parameters = self.reader.facts.get("parameters")
        if isinstance(parameters, dict):
            for trainable, count in parameters.items():
                if isinstance(count, int):
                    pair = ("trainable", str(trainable))
                    self._put(catalog.TRAINING_PARAMETERS, count, now_ns, pair)
        version = (self.reader.identities, self.reader.definitions_read)
        if version != self._info_of or self._info is None:
            self._info_of = version
            if self._info is not None:
                self._ledger.forget(self._info)
            labels = (
                *self.labels,
                *info_labels(self.identity, self.reader.facts, self.reader.config),
            )
            self._info = self._ledger.series(
                catalog.TRAINING_RUN_INFO, labels, self.reader.created_ns, self.project
            )
        self._info.value, self._info.time_ns = 1.0, now_ns

    def describe(self) -> dict[str, Any]:
        """What `otel-ddp status` shows of this process."""
        described = process_status.describe(
            self.reader, self.state, self.last_step, self.seen_alive_ns
        )
        described["node"] = dict(self.labels).get("node", described["node"])
        return described


def rank_labels(who: dict[str, Any], node: str, pid: int) -> Labels:
    """The six labels of a process."""
    rank, local_rank = who.get("global_rank"), who.get("local_rank")
    return (
        ("group", str(who.get("group") or "")),
        ("run", str(who.get("run") or "")),
        ("job_type", str(who.get("job_type") or "")),
        ("node", node),
        # Without a rank the process id tells two processes apart, and is plainly no rank.
        ("rank", f"p{pid}" if rank is None else str(rank)),
        ("local_rank", "" if local_rank is None else str(local_rank)),
    )
