"""Reads one process's journal: into the ledger, and for those who look at what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from otel_ddp import errors, files
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.documents import (
    Devices,
    Documents,
    RunDescription,
    checkpoint_event,
)
from otel_ddp.agent.reading.logged_values import LoggedValues, Summaries
from otel_ddp.agent.reading.phase_shares import PhaseShares
from otel_ddp.agent.reading.process_series import ProcessSeries
from otel_ddp.agent.reading.steps import Step, StepStream
from otel_ddp.journal.layout import END, EVENT
from otel_ddp.journal.parser import Document, Record, Scalars, Steps
from otel_ddp.journal.process_state import ENDED, ProcessState, ended_by_parent, last_step, state_of
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary.words import STATES

log = logging.getLogger("otel_ddp.agent")

# Does not export a process without a final identity, such as its rank, for this long.
_UNSETTLED_S = 60.0
_SAY_LOST_EVERY_S = 300.0
# An agent that has not looked for so long does not know when a process died.
_PAUSED_NS = 5_000_000_000


class News(NamedTuple):
    """What the last poll has read of a process."""

    scalars: list[Scalars]
    steps: list[Step]
    device_steps: list[Step]
    """The same on the device's clock, which lags behind the host's."""
    estimated: list[Step]
    device_estimated: list[Step]
    """Both, with estimates of what was not measured."""
    events: list[Document]
    """Of processes whose series leave the node."""
    overwritten: list[tuple[int, int]]
    """Times between which records were overwritten before they were read."""

    @property
    def size(self) -> int:
        """How many records and steps."""
        steps = len(self.steps) + len(self.device_steps)
        return steps + len(self.scalars) + len(self.events)


def _nothing() -> News:
    return News([], [], [], [], [], [], [])


class Life:
    """Whether a process lives, and how it ended."""

    def __init__(self, created_ns: int, ended_well: Callable[[], bool | None]) -> None:
        """*ended_well*: of a process that died without a last record; None: not known yet."""
        self.state = STATES["starting"]
        self.ended_at: float | None = None
        self.seen_alive_ns = created_ns
        self.gone_ns = 0
        """When the process was first found dead; 0 while it lives."""
        self.ended_ns = 0
        """When it ended: as it recorded, else when it was found dead; 0 until then. Where no agent
        looked for a while, maybe for hours: when it wrote last."""
        self._ended_well = ended_well
        self._has_ended_well: bool | None = None

    def update(self, reader: JournalReader, now_ns: int, alive: bool) -> None:
        """What its last record and the lock on its journal say now."""
        if alive:
            self.seen_alive_ns = now_ns
        elif not self.gone_ns:
            # It was alive at the last poll and is dead now: it died in between.
            self.gone_ns = time.time_ns()
        progress = reader.progress()
        recorded = None if progress is None else progress.state
        self.state = state_of(recorded, alive)
        if self.state == STATES["killed"]:
            if self._has_ended_well is None:
                self._has_ended_well = self._ended_well()
            self.state = state_of(recorded, alive, self._has_ended_well)
        if self.state in ENDED and self.ended_at is None:
            self.ended_at = time.monotonic()
            if progress is not None and progress.state in ENDED:
                self.ended_ns = progress.state_since_ns
            elif progress is not None and self._was_unseen(reader):
                written_ns = [each.time_ns for each in reader.latest()]
                phase_ns = reader.created_ns + progress.phase_after_ns
                last_ns = max([self.seen_alive_ns, phase_ns, *written_ns])
                self.ended_ns = min(self.gone_ns, last_ns)
            else:
                self.ended_ns = self.gone_ns

    def _was_unseen(self, reader: JournalReader) -> bool:
        """Whether no agent has seen it alive, or none has looked for long."""
        unseen_ns = self.gone_ns - self.seen_alive_ns
        return self.seen_alive_ns == reader.created_ns or unseen_ns > _PAUSED_NS


class Ends:
    """Decides how processes end that record no end; here, as far as a journal shows that."""

    def ended_well(self, journal: JournalFeed) -> bool | None:
        """Whether a process that died had done its work; None: not known yet."""
        return ended_by_parent(journal.reader)


class JournalFeed:
    """One a journal."""

    def __init__(
        self,
        reader: JournalReader,
        ledger: Ledger,
        name_node: Callable[[dict[str, Any]], str],
        ends: Ends | None = None,
        summaries: Summaries | None = None,
        devices: Devices = dict,
    ) -> None:
        """*summaries*: those of the node's other journals. *devices*: what is known of the
        node's devices."""
        self.reader: JournalReader = reader
        # The process id as the agent sees it, which differs if only the process is in a container.
        # 0 if the agent cannot see it: the process's own number may be another process here.
        holder = files.lock_holder(reader.path)
        self.pid = reader.pid if holder is None else holder
        self.labels: Labels = ()
        self._ends = ends or Ends()
        self.life = Life(reader.created_ns, lambda: self._ends.ended_well(self))
        self.new = _nothing()
        self.documents = Documents(reader, devices)
        self.artifacts: dict[tuple[str, str], dict[str, Any]] = {}
        """By name and direction: what is known of the newest, once it is read."""
        self.unread_artifacts = 0
        self._ledger = ledger
        self._name_node = name_node
        self._labelled: dict[str, Any] = {}
        self._values = LoggedValues(reader, ledger, {} if summaries is None else summaries)
        self._series = ProcessSeries(reader, ledger)
        # By the clock of the host, and by the device's.
        self._streams = StepStream(reader.created_ns), StepStream(reader.created_ns)
        self._shares = PhaseShares(), PhaseShares(on_device=True)
        self._overruns = _Overruns(reader)

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
    def project(self) -> str:
        return str(self.identity.get("project") or "")

    @property
    def description(self) -> RunDescription:
        """What its run says of itself."""
        return self.documents.description

    def settled(self) -> bool:
        """Whether its identity is final, or will not become final any more."""
        if self.identity.get("settled"):
            return True
        age_s = (time.time_ns() - self.reader.created_ns) / 1e9
        return self.ended_at is not None or age_s > _UNSETTLED_S or self.reader.unread_ratio() > 0.5

    def _update_labels(self) -> None:
        if self._labelled is self.identity:
            return
        self._labelled = self.identity
        labels = rank_labels(self.identity, self._name_node(self.identity), self.reader.pid)
        if labels != self.labels:
            if self.labels:
                self._ledger.drop(self.labels)
            self._series.relabel(labels)
            self._values.relabel(labels)
            self.labels = labels

    # -- its life

    @property
    def state(self) -> int:
        return self.life.state

    @property
    def ended_at(self) -> float | None:
        return self.life.ended_at

    def step(self) -> int | None:
        """The last step that the process recorded."""
        return last_step(self.reader, self._values.last_step)

    def describe(self) -> ProcessState:
        """What is known of this process now."""
        return ProcessState.read(
            self.reader,
            self.life.state,
            of_values=self._values.last_step,
            seen_alive_ns=self.life.seen_alive_ns,
            node=dict(self.labels).get("node", ""),
        )

    # -- reading

    def poll(self, now_ns: int, alive: bool) -> None:
        """Read what is new. The caller holds the ledger's lock."""
        self.new = _nothing()
        self.reader.read_definitions()
        self.life.update(self.reader, now_ns, alive)
        if not self.settled():
            return
        self._update_labels()
        self._values.restore()
        for record in self._overruns.read(now_ns, self.labels, self.new):
            if isinstance(record, Scalars):
                self._values.feed(record)
                self.new.scalars.append(record)
            elif isinstance(record, Steps):
                self._feed_steps(record)
            elif record.kind == END:
                # It may have ended after its progress was read.
                self.life.update(self.reader, now_ns, alive)
            elif self.exported:
                self._feed_document(record)
        if self.is_sent:
            ended = self.ended_at is not None
            self.documents.add_run(now_ns, self.life.state, self.life.ended_ns, ended=ended)
        self._values.keep()

    @property
    def is_sent(self) -> bool:
        """Whether its documents leave: without a collector they would pile up."""
        return self.exported and self._ledger.keep_history

    @errors.contained()
    def _feed_steps(self, record: Steps) -> None:
        steps = self._streams[record.on_device].feed(record)
        estimated = self._shares[record.on_device].fill(steps)
        if record.on_device:
            self.new.device_steps.extend(steps)
            self.new.device_estimated.extend(estimated)
            return
        self.new.steps.extend(steps)
        self.new.estimated.extend(estimated)
        if self.is_sent:
            for step, span in self.documents.add_steps(steps, self.labels, record.position):
                self._series.exemplify(step, span)

    def _feed_document(self, document: Document) -> None:
        saved = checkpoint_event(document)
        told = [document] if saved is None else [document, saved]
        self.new.events.extend(each for each in told if each.kind == EVENT)
        if self.is_sent:
            self.documents.waiting += told

    def update_series(self, now_ns: int, is_newest: bool) -> None:
        """Write state and totals into the ledger. The caller holds the ledger's lock.

        *is_newest*: false if a newer process has the same labels, as a child that became rank 0
        or the next attempt: only the newest one writes.
        """
        if self.labels and self.exported and is_newest:
            self._series.update(self.describe(), self._values, self.description, now_ns)
            self._series.update_artifacts(self.artifacts.values(), now_ns)


class _Overruns:
    """Reads records; those that were overwritten before are rescued, or counted and said."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._read_ns = reader.created_ns
        # Not said yet, and when it may be.
        self._lost, self._say_at = 0, 0.0

    def read(self, now_ns: int, labels: Labels, new: News) -> Iterable[Record]:
        """The records that are new."""
        reader = self._reader
        before, lost = reader.position, reader.lost
        records = reader.read()
        if reader.lost > lost:
            records = self._rescued(before, records) + records
        if reader.lost > lost:
            new.overwritten.append((self._read_ns, now_ns))
            self._lost += reader.lost - lost
        self._read_ns = now_ns
        self._say(dict(labels))
        return records

    def _rescued(self, before: int, records: list[Record]) -> list[Record]:
        """Of the records that were overwritten, the last of each name, which has a copy."""
        first = records[0].position if records else self._reader.position
        found: list[Record] = [
            record for record in self._reader.latest() if before <= record.position < first
        ]
        self._reader.ring.lost -= len(found)
        return found

    def _say(self, labels: dict[str, str]) -> None:
        now = time.monotonic()
        if self._lost and now >= self._say_at:
            log.warning(
                "%d records of rank %s of run %s were overwritten before they were read: values "
                "come faster than the agent reads, or it could not read for a while. The last "
                "value of each name is there. A larger OTEL_DDP_JOURNAL_BYTES bridges more.",
                self._lost,
                labels.get("rank", "?"),
                labels.get("run", "?"),
            )
            self._lost, self._say_at = 0, now + _SAY_LOST_EVERY_S


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
