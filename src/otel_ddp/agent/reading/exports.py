"""What leaves the node of one process: its series, and the documents that wait for the export."""

from __future__ import annotations

from typing import Any

from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.documents import Documents
from otel_ddp.agent.reading.logged_values import LoggedValues, Summaries
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.reading.process_series import ProcessSeries
from otel_ddp.journal.reader import JournalReader


class Exports:
    """One a process, fed after each poll of it. Callers hold the lock of the ledger."""

    def __init__(
        self,
        reader: JournalReader,
        process: Process,
        ledger: Ledger,
        summaries: Summaries | None = None,
    ) -> None:
        """*summaries*: those of the node's other journals."""
        self.reader, self.process = reader, process
        self.documents = Documents(reader, process.description)
        self.artifacts: dict[tuple[str, str], dict[str, Any]] = {}
        """By name and direction: what is known of the newest, once it is read."""
        self.unread_artifacts = 0
        self._labels = process.labels
        self._ledger = ledger
        self._values = LoggedValues(reader, ledger, {} if summaries is None else summaries)
        self._series = ProcessSeries(reader, ledger)

    @property
    def is_sent(self) -> bool:
        """Whether its documents leave: without a collector they would pile up."""
        return self.process.exported and self._ledger.keep_history

    def feed(self, process: Process, now_ns: int) -> None:
        """What its last poll has read."""
        self.process, labels, new = process, process.labels, process.new
        if not labels:
            return
        if labels != self._labels:
            if self._labels:
                self._ledger.drop(self._labels)
            self._series.relabel(labels)
            self._values.relabel(labels)
            self._labels, process.extremes = labels, self._values.extremes
        self._values.restore(process.mark_before[0])
        for record in new.scalars:
            self._values.feed(record)
        if self.is_sent:
            spans = self.documents.add_steps(new.steps, labels, self.reader.position)
            for step, span in spans:
                self._series.exemplify(step, span)
            self.documents.waiting += [*new.spans, *new.events]
            ended = not process.is_at_work
            self.documents.add_run(now_ns, process.life.state, process.life.ended_ns, ended=ended)

    def update_series(self, now_ns: int, *, is_newest: bool) -> None:
        """Write state and totals into the ledger.

        *is_newest*: false if a newer process has the same labels, as a child that became rank 0
        or the next attempt: only the newest one writes.
        """
        process = self.process
        if self._labels and process.exported and is_newest:
            self._series.update(process.describe(), self._values, process.description, now_ns)
            self._series.update_artifacts(self.artifacts.values(), now_ns)
