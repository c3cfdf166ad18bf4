"""The ledger: the current value of every series, for /metrics and the export."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from otel_ddp.vocabulary.catalog import Kind, Metric
from otel_ddp.vocabulary.words import Labels as Labels

# The most points of one series that wait for the next export. If there are more, the oldest points
# are dropped, and their number is exported.
_MOST_POINTS = 200_000
# One millisecond in nanoseconds. It is the least distance of two points of a series: Prometheus
# stores milliseconds, and refuses two values with the same time stamp.
MS = 1_000_000
# Values that come faster than one per millisecond get later time stamps, but later by this much at
# most. So a burst is exported whole, but a constant stream does not drift into the future.
_MOST_LATE_NS = 60 * 10**9
# If the clock is set back by more than this, let time stamps go back too. Receivers have refused
# the earlier points, which were too far in the future, so the new points can't conflict with them.
_REFUSED_NS = 600 * 10**9


class Buckets(NamedTuple):
    """The value of a histogram: the count of each bucket, not cumulative, and the sum."""

    counts: tuple[float, ...]
    total: float


class Series:
    """One metric with one set of attributes, and its current value."""

    __slots__ = (
        "__weakref__",
        "encoded",
        "history",
        "labels",
        "metric",
        "project",
        "start_ns",
        "time_ns",
        "value",
    )

    def __init__(self, metric: Metric, labels: Labels, start_ns: int, project: str) -> None:
        self.metric = metric
        self.labels = labels
        self.start_ns = start_ns
        self.project = project
        self.value: float | Buckets | None = None
        self.time_ns = 0
        # Times and values of the points to export, if each logged value is exported as a point.
        self.history: tuple[list[int], array[float]] | None = None
        # The attributes as encoded for OTLP; empty until the series is exported.
        self.encoded = b""


class Ledger:
    """The agent's loop writes the series, the endpoint's threads read them; both hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.keep_history = False
        self.points_dropped = 0
        self.reports_ends = True
        """Whether removed series are exported as ended; False if another agent continues them."""
        self._families: dict[str, dict[Labels, Series]] = {}
        self._ended: list[Series] = []

    def series(
        self, metric: Metric, labels: Labels, start_ns: int = 0, project: str = ""
    ) -> Series:
        """The series with these attributes, created at its first use."""
        family = self._families.setdefault(metric.name, {})
        found = family.get(labels)
        if found is None:
            found = family[labels] = Series(metric, labels, start_ns, project)
        return found

    def put(
        self,
        metric: Metric,
        labels: Labels,
        value: float | Buckets,
        time_ns: int,
        start_ns: int = 0,
        project: str = "",
    ) -> None:
        """Set the value of a series."""
        found = self.series(metric, labels, start_ns, project)
        found.value = value
        found.time_ns = time_ns
        # The start time may change: if a new process has the same labels, its counters begin anew.
        found.start_ns = start_ns

    def log(self, series: Series, value: float, time_ns: int) -> int | None:
        """Add a logged value; returns the time of its point, or None if it is not exported.

        The time stamps of a series grow by at least a millisecond. If this would make the point's
        time stamp too late, the value becomes the series' current value, but is not exported.
        """
        series.value = value
        late_ns = series.time_ns + MS - time_ns
        if late_ns > 0:
            if late_ns <= _MOST_LATE_NS:
                time_ns += late_ns
            elif late_ns <= _REFUSED_NS:
                return None
        series.time_ns = time_ns
        if self.keep_history:
            if series.history is None:
                series.history = [], array("d")
            times, values = series.history
            if len(times) >= _MOST_POINTS:
                del times[: _MOST_POINTS // 10], values[: _MOST_POINTS // 10]
                self.points_dropped += _MOST_POINTS // 10
            times.append(time_ns)
            values.append(value)
        return time_ns

    def drop(self, labels: Labels, *metrics: Metric) -> None:
        """Remove the series whose attributes begin with these labels: of *metrics*, or of all."""
        length, names = len(labels), {each.name for each in metrics} or self._families.keys()
        self._remove(lambda key: key[:length] == labels, names)

    def end_all(self, kept_runs: Collection[str]) -> None:
        """Remove all series except those of *kept_runs*, before the agent ends."""
        self._remove(lambda key: dict(key).get("run") not in kept_runs, self._families)

    def _remove(self, which: Callable[[Labels], bool], names: Iterable[str]) -> None:
        for family in (self._families.get(each, {}) for each in names):
            for key in [key for key in family if which(key)]:
                self._end(family.pop(key))

    def forget(self, series: Series) -> None:
        """Remove one series, unless another one with its attributes has replaced it."""
        family = self._families.get(series.metric.name, {})
        if family.get(series.labels) is series:
            self._end(family.pop(series.labels))

    def _end(self, series: Series) -> None:
        # Don't report the end of a series that was never exported: no backend knows it.
        if series.encoded and self.reports_ends:
            self._ended.append(series)

    def take_ended(self) -> list[Series]:
        """Take the series whose end is to be exported: those that were exported before, and that
        were removed and not replaced since the last call."""
        ended, self._ended = self._ended, []
        return [each for each in ended if not self._has_value(each)]

    def _has_value(self, series: Series) -> bool:
        found = self._families.get(series.metric.name, {}).get(series.labels)
        # A series with equal labels, but of another project, is another series in Prometheus: the
        # project is its `job` label.
        return found is not None and found.value is not None and found.project == series.project

    def of(self, metrics: Iterable[Metric]) -> Iterator[tuple[Metric, list[Series]]]:
        """Each of these metrics, with all its series."""
        for metric in metrics:
            yield metric, list(self._families.get(metric.name, {}).values())

    def families(self) -> Iterator[tuple[Metric, list[Series]]]:
        """Each metric that has series with a value, and these series."""
        for family in self._families.values():
            filled = [series for series in family.values() if series.value is not None]
            if filled:
                yield filled[0].metric, filled


def is_logged(metric: Metric) -> bool:
    """Whether every logged value of this metric is exported, each as a point with its own time."""
    return metric.kind is Kind.GAUGE and metric.section == "Learning"
