"""The series of the values that one process logs: their points, and the times of these."""

from __future__ import annotations

from typing import NamedTuple

from otel_ddp import errors
from otel_ddp.agent.ledger import Labels, Ledger, Series
from otel_ddp.agent.reading.summary import Key, Summaries, SummaryOfJournal
from otel_ddp.journal.reader import JournalReader, Scalars
from otel_ddp.vocabulary import catalog


class _Entry(NamedTuple):
    """The series of one logged name."""

    value: Series
    step: Series
    epoch: Series
    key: Key


class LoggedValues:
    """One a process. The caller of every method holds the ledger's lock."""

    def __init__(self, reader: JournalReader, ledger: Ledger, summaries: Summaries) -> None:
        self.last_step: int | None = None
        self.last_epoch: float | None = None
        self.too_fast = 0
        """How many records were left out because they came too fast."""
        self.summary = SummaryOfJournal(reader, ledger, summaries)
        self._reader = reader
        self._ledger = ledger
        self._labels: Labels = ()
        # By the number of the name.
        self._entries: dict[int, _Entry] = {}
        self._restored = False

    @property
    def _exported(self) -> bool:
        return bool(self._reader.identity.get("exported"))

    @property
    def _sent(self) -> bool:
        return self._exported and self._ledger.keep_history

    def relabel(self, labels: Labels) -> None:
        """Go on with new series, under these labels."""
        self._labels = labels
        self.summary.relabel(labels)
        self._entries.clear()
        self._restored = False

    def restore(self) -> None:
        """Show the values that an earlier agent has exported, without sending them again."""
        if self._restored:
            return
        self._restored = True
        self.summary.restore()
        for record in self._reader.latest():
            if record.position < self._reader.position:
                self._show(record)

    def _show(self, record: Scalars) -> None:
        step, epoch = record.step, record.epoch
        self._keep_last(step, epoch)
        if not self._exported:
            return
        for number, value in record.values:
            entry = self._entries.get(number) or self._make_entry(number)
            if entry is None:
                continue
            for series, seen in ((entry.value, value), (entry.step, step), (entry.epoch, epoch)):
                if seen is not None and record.time_ns >= series.time_ns:
                    series.value, series.time_ns = float(seen), record.time_ns
            self.summary.feed(entry.key, value, step, record.time_ns)

    def feed(self, record: Scalars) -> None:
        """Add the values of one record."""
        self._keep_last(record.step, record.epoch)
        if not self._exported:
            return
        too_fast: int | None = None
        for number, value in record.values:
            entry = self._entries.get(number) or self._make_entry(number)
            if entry is None:
                continue
            self.summary.feed(entry.key, value, record.step, record.time_ns)
            if not self._log(entry, value, record):
                too_fast = number
        if too_fast is not None and self._sent:
            self._leave_out(self._reader.names[too_fast].text)

    def _keep_last(self, step: int | None, epoch: float | None) -> None:
        if step is not None:
            self.last_step = step
        if epoch is not None:
            self.last_epoch = epoch

    def _log(self, entry: _Entry, value: float, record: Scalars) -> bool:
        """Whether there is a new point: there is none where values come too fast."""
        ledger, step, epoch = self._ledger, record.step, record.epoch
        at = ledger.log(entry.value, value, record.time_ns)
        if at is None:
            if step is not None:
                entry.step.value = float(step)
            if epoch is not None:
                entry.epoch.value = epoch
            return False
        if step is not None:
            ledger.log(entry.step, float(step), at)
        if epoch is not None:
            ledger.log(entry.epoch, epoch, at)
        return True

    def _leave_out(self, name: str) -> None:
        self.too_fast += 1
        labels = dict(self._labels)
        errors.warn_once(
            f"too fast: {labels['run']}",
            "rank %s logs %r more often than a thousand times a second, or its clock was set back. "
            "Points are a millisecond apart at least, and these are a minute late by now: so "
            "values that come faster are left out and counted (otel_ddp_records_lost_total, "
            'why="too_fast"). Log fewer of them, or a mean of several.',
            *(labels["rank"], name),
        )

    def _make_entry(self, number: int) -> _Entry | None:
        name = self._reader.names.get(number)
        if name is None:
            return None  # its definition was not readable: no value without a name
        labels = (*self._labels, ("name", name.text), ("split", name.split))
        start_ns = self._reader.created_ns
        project = str(self._reader.identity.get("project") or "")
        value, step, epoch = (
            self._ledger.series(metric, labels, start_ns, project)
            for metric in (
                catalog.TRAINING_SCALAR,
                catalog.TRAINING_SCALAR_STEP,
                catalog.TRAINING_SCALAR_EPOCH,
            )
        )
        nonfinite = self._ledger.series(catalog.TRAINING_NONFINITE, labels, start_ns, project)
        if nonfinite.value is None:
            # So that the first event is an increase, for every name although few ever need it.
            # A 0 that is made together with the first event may never be scraped, and without a 0
            # before it Prometheus' increase() does not see that event.
            nonfinite.value = 0.0
        entry = self._entries[number] = _Entry(value, step, epoch, name)
        return entry
