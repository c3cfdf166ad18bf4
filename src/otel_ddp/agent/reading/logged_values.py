"""The values that one process logs: their series, and the lowest and highest of each name."""

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

# Beyond it a name has no summary: the agent's document has all of them, and is written each second.
MOST_NAMES = 200


class Summary:
    """The extremes of one rank, over all its attempts."""

    def __init__(self, extremes: dict[Name, Extremes] | None = None) -> None:
        """*extremes*: those that an earlier agent has found."""
        self.extremes = extremes or {}
        """In the order in which the names came."""

    def feed(self, name: Name, value: float, step: int | None, time_ns: int) -> None:
        """Take a value into account; one that comes again changes nothing."""
        known = self.extremes.get(name)
        # Most values end here. NaN does as well, if the name is known.
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


# Those of all ranks of a node: a rank that is started again goes on with its summary.
Summaries = dict[Labels, Summary]


def summaries_of(processes: Iterable[ProcessState]) -> Summaries:
    """Those that an agent has written into its document."""
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
    """One a process. The caller of every method holds the ledger's lock."""

    def __init__(self, reader: Journal, ledger: Ledger, summaries: Summaries) -> None:
        self.too_fast = 0
        """How many records were left out because they came too fast: points are a millisecond apart
        at least, and late by a minute at most."""
        self._summaries = summaries
        # Of rank 0 alone: 2 series a name are little for one rank, and much for thousands.
        self._summary: Summary | None = None
        self._reader = reader
        self._ledger = ledger
        self._labels: Labels = ()
        # By the number of the name.
        self._entries: dict[int, _Entry] = {}
        self._restored = False

    @property
    def _exported(self) -> bool:
        return bool(self._reader.identity.get("exported"))

    def relabel(self, labels: Labels) -> None:
        """Go on with new series, under these labels."""
        self._labels = labels
        is_first = self._exported and self._reader.identity.get("global_rank") == 0
        self._summary = self._summaries.setdefault(labels, Summary()) if is_first else None
        self._entries.clear()
        self._restored = False

    def restore(self, position: int) -> None:
        """Show the values before this, as an earlier agent has exported, and send none again."""
        if self._restored:
            return
        self._restored = True
        for record in self._reader.latest():
            if record.position < position:
                self._show(record)

    def _show(self, record: Scalars) -> None:
        step, epoch = record.step, record.epoch
        if not self._exported:
            return
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
        # This runs for every value of every rank.
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
                # Values come too fast: there is no new point.
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
        """Those of its rank, over all attempts; none but of rank 0."""
        return {} if self._summary is None else self._summary.extremes

    def best(self) -> Iterator[tuple[Name, str, Point]]:
        """The best value of each name, and which way that is."""
        chosen = chosen_directions(self._reader)
        for name, extremes in self.extremes.items():
            if way := direction(name.text, chosen):
                yield name, way, extremes.best(way)

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
