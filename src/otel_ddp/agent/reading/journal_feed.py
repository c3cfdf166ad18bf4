"""Feeds one process's journal into the ledger: its identity, state, values, steps and documents."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.checkpoint_events import event_of
from otel_ddp.agent.reading.finished_workers import ended_by_parent
from otel_ddp.agent.reading.logged_values import LoggedValues
from otel_ddp.agent.reading.process_series import ProcessSeries
from otel_ddp.agent.reading.run_description import Devices, RunDescription, no_devices
from otel_ddp.agent.reading.run_info import RunRecords
from otel_ddp.agent.reading.run_span import context, run_span
from otel_ddp.agent.reading.step_spans import StepSpans, sampled_every
from otel_ddp.agent.reading.steps import Step, StepStream
from otel_ddp.agent.reading.summary import Summaries
from otel_ddp.errors import containment
from otel_ddp.journal.layout import ARTIFACT, END, EVENT, SPAN
from otel_ddp.journal.locks import lock_holder
from otel_ddp.journal.process_state import ENDED, ProcessState, is_proxy, state_of
from otel_ddp.journal.reader import Document, JournalReader, ProgressRecord, Record, Scalars, Steps
from otel_ddp.words import STATES

log = logging.getLogger("otel_ddp.agent")

# Does not export a process without a final identity, such as its rank, for this long.
_UNSETTLED_S = 60.0
_SAY_LOST_EVERY_S = 300.0


class Kept(NamedTuple):
    """What the history keeps of what was read."""

    scalars: Sequence[Scalars]
    steps: Sequence[Step]
    device_steps: Sequence[Step]
    events: Sequence[Document]
    overwritten: Sequence[tuple[int, int]]
    """Times between which records were overwritten before they were read."""


def journal_alone_shows(journal: JournalFeed) -> bool | None:
    """Whether its parent ended this process, as far as its journal shows that."""
    return ended_by_parent(journal.reader)


class JournalFeed:
    """One a journal."""

    def __init__(
        self,
        reader: JournalReader,
        ledger: Ledger,
        name_node: Callable[[dict[str, Any]], str],
        ended_well: Callable[[JournalFeed], bool | None] = journal_alone_shows,
        summaries: Summaries | None = None,
        devices: Devices = no_devices,
        has_history: bool = False,
    ) -> None:
        """*ended_well*: whether this process, which died without a last record, ended well;
        None: not known yet. *summaries*: those of the node's other journals. *devices*: what is
        known of the node's devices. *has_history*: whether what is read is kept for a history,
        which fetches it."""
        self.reader: JournalReader = reader
        # The process id as the agent sees it, which differs if only the process is in a container.
        # 0 if the agent cannot see it: the process's own number may be another process here.
        holder = lock_holder(reader.path)
        self.pid = reader.pid if holder is None else holder
        self.labels: Labels = ()
        self.state = STATES["starting"]
        self.ended_at: float | None = None
        self.seen_alive_ns = reader.created_ns
        # When the process was first found dead; 0 while it lives.
        self.gone_ns = 0
        self.documents: list[Document] = []
        self.artifacts: list[Document] = []
        self._ledger = ledger
        self._name_node = name_node
        self._ended_well = ended_well
        self._has_ended_well: bool | None = None
        self._known_identities = -1
        self._values = LoggedValues(reader, ledger, summaries or Summaries())
        self._series = ProcessSeries(self, ledger)
        self.description = RunDescription(reader, devices)
        self._run_records = RunRecords()
        self._has_run_span = False
        self._stream = StepStream(reader.created_ns)
        self._step_spans = StepSpans()
        self._steps: list[Step] = []
        self._device_stream = StepStream(reader.created_ns)
        self._device_steps: list[Step] = []
        self._has_history = has_history
        self._kept = Kept([], [], [], [], [])
        self._read_ns = reader.created_ns
        # Not said yet, and when it may be.
        self._lost_records, self._say_lost_at = 0, 0.0

    # -- its identity

    @property
    def identity(self) -> dict[str, Any]:
        return self.reader.identity

    @property
    def world_size(self) -> int | None:
        """How many ranks train together with this one; None if unknown."""
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
        """Whether its identity is final, or will not become final any more."""
        if self.identity.get("settled"):
            return True
        age_s = (time.time_ns() - self.reader.created_ns) / 1e9
        return self.ended_at is not None or age_s > _UNSETTLED_S or self.reader.unread_ratio() > 0.5

    def _update_labels(self) -> None:
        if self._known_identities == self.reader.identity_count:
            return
        self._known_identities = self.reader.identity_count
        labels = rank_labels(self.identity, self._name_node(self.identity), self.reader.pid)
        if labels != self.labels:
            if self.labels:
                self._ledger.drop(self.labels)
            self._series.clear()
            self._values.relabel(labels)
            self.labels = labels

    # -- reading

    def poll(self, now_ns: int, alive: bool) -> None:
        """Read what is new. The caller holds the ledger's lock."""
        self.reader.read_definitions()
        if alive:
            self.seen_alive_ns = now_ns
        self._update_state(self.reader.progress(), alive)
        if not self.settled():
            return
        self._update_labels()
        self._values.restore()
        before, lost = self.reader.position, self.reader.lost
        records = self.reader.read()
        if self.reader.lost > lost:
            records = self._rescued(before, records) + records
        if self.reader.lost > lost:
            self._keep(overwritten=[(self._read_ns, now_ns)])
            self._lost_records += self.reader.lost - lost
        self._read_ns = now_ns
        self._say_lost()
        for record in records:
            if isinstance(record, Scalars):
                self._values.feed(record)
                if self.exported:
                    self._keep(scalars=[record])
            elif isinstance(record, Steps):
                self._feed_steps(record)
            elif record.kind == END:
                # It may have ended after its progress was read.
                self._update_state(self.reader.progress(), alive)
            elif record.kind == ARTIFACT:
                if self.exported:
                    self.artifacts.append(record)
            elif self.exported:
                saved = [each for each in (event_of(record),) if each is not None]
                self._keep(events=[each for each in (record, *saved) if each.kind == EVENT])
                if self._sent:
                    self.documents += [record, *saved]
        if self._sent and self.identity.get("global_rank") == 0:
            ended = self.ended_at is not None
            self.documents += self._run_records.new_records(
                self.reader, self.description, now_ns, ended=ended
            )
        if self._sent and self.ended_at is not None and not self._has_run_span:
            self._has_run_span = True
            if (span := run_span(self.reader, self.state, self.gone_ns or now_ns)) is not None:
                self.documents.append(Document(SPAN, span, self.reader.position))
        self._values.summary.keep()

    @property
    def _sent(self) -> bool:
        # Without a collector nothing fetches the documents: they would pile up.
        return self.exported and self._ledger.keep_history

    @containment.contained()
    def _feed_steps(self, record: Steps) -> None:
        if record.on_device:
            device_steps = self._device_stream.feed(record)
            self._device_steps += device_steps
            self._keep(device_steps=device_steps)
            return
        steps = self._stream.feed(record)
        self._steps += steps
        self._keep(steps=steps)
        if not self._sent:
            return
        every = sampled_every(self.reader.facts)
        for step in steps:
            spans = self._step_spans.spans(step, self.labels, every)
            if spans:
                spans[0]["link"] = context(self.reader)
                self._series.exemplify(step, spans[0])
            self.documents += [Document(SPAN, each, record.position) for each in spans]

    def flush_steps(self) -> list[Step]:
        """The steps that were read since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def flush_device_steps(self) -> list[Step]:
        """The same on the device's clock, which lags behind the host's."""
        steps, self._device_steps = self._device_steps, []
        return steps

    def flush_kept(self) -> Kept:
        """What was read since the last call, for the history."""
        kept, self._kept = self._kept, Kept([], [], [], [], [])
        return kept

    def _keep(self, **more: Sequence[Any]) -> None:
        if self._has_history:
            for name, records in more.items():
                getattr(self._kept, name).extend(records)

    def _rescued(self, before: int, records: list[Record]) -> list[Record]:
        """Of the records that were overwritten, the last of each name, which has a copy."""
        first = records[0].position if records else self.reader.position
        found: list[Record] = [
            record for record in self.reader.latest() if before <= record.position < first
        ]
        self.reader.lost -= len(found)
        return found

    def _say_lost(self) -> None:
        now = time.monotonic()
        if self._lost_records and now >= self._say_lost_at:
            log.warning(
                "%d records of rank %s of run %s were overwritten before they were read: values "
                "come faster than the agent reads, or it could not read for a while. The last "
                "value of each name is there. A larger OTEL_DDP_JOURNAL_BYTES bridges more.",
                self._lost_records,
                dict(self.labels).get("rank", "?"),
                dict(self.labels).get("run", "?"),
            )
            self._lost_records, self._say_lost_at = 0, now + _SAY_LOST_EVERY_S

    def _update_state(self, progress: ProgressRecord | None, alive: bool) -> None:
        recorded = None if progress is None else progress.state
        self.state = state_of(recorded, alive)
        if self.state == STATES["killed"]:
            if self._has_ended_well is None:
                self._has_ended_well = self._ended_well(self)
            self.state = state_of(recorded, alive, self._has_ended_well)
        if self.state in ENDED and self.ended_at is None:
            self.ended_at = time.monotonic()

    # -- its state, for the ledger and for people

    def update_series(self, now_ns: int, is_newest: bool) -> None:
        """Write state and totals into the ledger. The caller holds the ledger's lock.

        *is_newest*: false if a newer process has the same labels, as a child that became rank 0
        or the next attempt: only the newest one writes.
        """
        if self.labels and self.exported and is_newest:
            self._series.update(now_ns)
            self._values.summary.update_series(now_ns)

    def step(self) -> int | None:
        """The last step that the process recorded."""
        progress = self.reader.progress()
        steps = [self._values.last_step, None if progress is None else progress.step]
        return max((step for step in steps if step is not None), default=None)

    @property
    def last_epoch(self) -> float | None:
        """The last epoch with which a value was logged."""
        return self._values.last_epoch

    @property
    def too_fast(self) -> int:
        """How many records were left out because they came too fast."""
        return self._values.too_fast

    def describe(self) -> ProcessState:
        """What is known of this process now."""
        return ProcessState.read(
            self.reader,
            self.state,
            last_step=self._values.last_step,
            seen_alive_ns=self.seen_alive_ns,
            node=dict(self.labels).get("node", ""),
        )


def rank_labels(identity: dict[str, Any], node: str, pid: int) -> Labels:
    """The six labels of a process."""
    rank, local_rank = identity.get("global_rank"), identity.get("local_rank")
    return (
        ("group", str(identity.get("group") or "")),
        ("run", str(identity.get("run") or "")),
        ("job_type", str(identity.get("job_type") or "")),
        ("node", node),
        # Without a rank the process id tells two processes apart, and is plainly no rank.
        ("rank", f"p{pid}" if rank is None else str(rank)),
        ("local_rank", "" if local_rank is None else str(local_rank)),
    )
