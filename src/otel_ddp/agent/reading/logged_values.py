"""The logged values of one process: series, and lowest and highest value of each name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels, Ledger, Series
from otel_ddp.agent.reading.process import rank_labels
from otel_ddp.journal.parser import Journal, Name, Scalars
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.values import Extremes, Point, chosen_directions, direction, extremes_of
from otel_ddp.vocabulary import catalog

# Limit of names with a summary. The agent writes all of them to its file each second.
MOST_NAMES = 200


class Summary:
    """The lowest and highest value of each name that one rank has logged, over all attempts."""

    def __init__(self, extremes: dict[Name, Extremes] | None = None) -> None:
        """*extremes*: the extremes that an earlier agent stored."""
        self.extremes = extremes or {}
        """The extremes by name, in the order of the names' first values."""

    def feed(self, name: Name, value: float, step: int | None, time_ns: int) -> None:
        """Update the extremes with a value. Adding a value again changes nothing."""
        known = self.extremes.get(name)
        # The usual case: the value is neither a new lowest nor a new highest one. A NaN also ends
        # here if its name is known, since comparisons with NaN are false.
        if known is not None and not (value < known.lowest.value or value > known.highest.value):
            return
        if not isfinite(value) or (known is None and len(self.extremes) >= MOST_NAMES):
            return
        point = Point(value, step, time_ns)
        if known is None:
            self.extremes[name] = Extremes(point, point)
        elif value < known.lowest.value:
            self.extremes[name] = known._replace(lowest=point)
        else:
            self.extremes[name] = known._replace(highest=point)


# The summary of each rank of a node, by the rank's labels. A restarted rank has the same labels, so
# its summary continues.
Summaries = dict[Labels, Summary]


def summaries_of(processes: Iterable[ProcessState]) -> Summaries:
    """Take the summaries from the processes in an agent's file."""
    return {
        rank_labels({**vars(each), "global_rank": each.rank}, each.node, each.pid): Summary(found)
        for each in processes
        if (found := extremes_of(each.summary))
    }


class _Entry(NamedTuple):
    """The series of one logged name."""

    value: Series
    step: Series
    epoch: Series
    name: Name


class LoggedValues:
    """The logged values of one process. Callers hold the ledger's lock."""

    def __init__(self, reader: Journal, ledger: Ledger, summaries: Summaries) -> None:
        self.too_fast = 0
        """How many records had values that came too fast to be exported: exported points are at
        least a millisecond apart and at most a minute late."""
        self._summaries = summaries
        # Only rank 0 has a summary. Its two series for each name would be too many for thousands of
        # ranks.
        self._summary: Summary | None = None
        self._reader = reader
        self._ledger = ledger
        self._labels: Labels = ()
        # The series of each name, by the name's number in the journal.
        self._entries: dict[int, _Entry] = {}
        self._restored = False

    @property
    def _exported(self) -> bool:
        return bool(self._reader.identity.get("exported"))

    def relabel(self, labels: Labels) -> None:
        """Use these labels from now on, and new series with them."""
        self._labels = labels
        is_first = self._exported and self._reader.identity.get("global_rank") == 0
        self._summary = self._summaries.setdefault(labels, Summary()) if is_first else None
        self._entries.clear()
        self._restored = False

    def restore(self, position: int) -> None:
        """Restore the latest values that an earlier agent exported: those before this offset."""
        if self._restored:
            return
        self._restored = True
        for record in self._reader.latest() if self._exported else ():
            if record.position < position:
                self._show(record)

    def _show(self, record: Scalars) -> None:
        step, epoch = record.step, record.epoch
        for number, value in zip(record.names, record.values, strict=True):
            entry = self._entries.get(number) or self._make_entry(number)
            if entry is None:
                continue
            for series, seen in ((entry.value, value), (entry.step, step), (entry.epoch, epoch)):
                if seen is not None and record.time_ns >= series.time_ns:
                    series.value, series.time_ns = float(seen), record.time_ns
            if self._summary is not None:
                self._summary.feed(entry.name, value, step, record.time_ns)

    def feed(self, record: Scalars) -> None:
        """Add the values of one record."""
        step, epoch, time_ns = record.step, record.epoch, record.time_ns
        if not self._exported:
            return
        # Hot path: runs for each value of each rank.
        too_fast, entries, summary = False, self._entries, self._summary
        log = self._ledger.log
        counted = None if step is None else float(step)
        for number, value in zip(record.names, record.values, strict=True):
            entry = entries.get(number) or self._make_entry(number)
            if entry is None:
                continue
            of_value, of_step, of_epoch, name = entry
            if summary is not None:
                summary.feed(name, value, step, time_ns)
            at = log(of_value, value, time_ns)
            if at is None:
                # The values came too fast for a new point: only update the current values.
                too_fast = True
                if counted is not None:
                    of_step.value = counted
                if epoch is not None:
                    of_epoch.value = epoch
                continue
            if counted is not None:
                log(of_step, counted, at)
            if epoch is not None:
                log(of_epoch, epoch, at)
        self.too_fast += too_fast and self._ledger.keep_history

    @property
    def extremes(self) -> Mapping[Name, Extremes]:
        """The lowest and highest values of this rank over all attempts; empty unless it is rank
        0."""
        return {} if self._summary is None else self._summary.extremes

    def best(self) -> Iterator[tuple[Name, str, Point]]:
        """The best value of each name, with its direction."""
        chosen = chosen_directions(self._reader)
        for name, extremes in self.extremes.items():
            if way := direction(name.text, chosen):
                yield name, way, extremes.best(way)

    def _make_entry(self, number: int) -> _Entry | None:
        name = self._reader.names.get(number)
        if name is None:
            return None  # the definition of the name is unreadable
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
            # The counter begins at 0 when the name appears: Prometheus' increase() misses the first
            # event if no 0 was scraped before.
            nonfinite.value = 0.0
        entry = self._entries[number] = _Entry(value, step, epoch, name)
        return entry
