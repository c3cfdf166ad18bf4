"""The ledger: every series of the node as it stands now. Both ways out are rendered from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

from otel_ddp.catalog import Kind, Metric

Labels = tuple[tuple[str, str], ...]

# History of one series between two exports; beyond it the oldest points go, and are counted.
_MOST_POINTS = 200_000
# Prometheus counts in milliseconds, and refuses a second value for the same one.
MS = 1_000_000
# A point stands at most so long after its value was logged: what is written out at once arrives
# whole, and what comes too fast for ever does not run away into the future.
_MOST_LATE_NS = 60 * 10**9
# Receivers refuse what is so far ahead of them, so nothing that was sent stands in the way there:
# a clock that was set back so far is followed.
_REFUSED_NS = 600 * 10**9


class Buckets(NamedTuple):
    """The value of a histogram: counts by bucket, not cumulative, and the sum."""

    counts: tuple[float, ...]
    total: float


class Series:
    """One metric with one set of attributes."""

    __slots__ = (
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
        # Kept by logged values only: each is a data point of its own.
        self.history: list[tuple[int, float]] | None = None
        self.encoded = b""


class Ledger:
    """Written by the agent's loop, read by the endpoint's threads; hold `lock` for either."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.keep_history = False
        self.points_dropped = 0
        self._families: dict[str, dict[Labels, Series]] = {}

    def series(
        self, metric: Metric, labels: Labels, start_ns: int = 0, project: str = ""
    ) -> Series:
        """The series of this name and these attributes, made at its first use."""
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
        """Set a series to what was just read."""
        found = self.series(metric, labels, start_ns, project)
        found.value = value
        found.time_ns = time_ns
        # A process that took the place of another one counts from its own beginning.
        found.start_ns = start_ns

    def log(self, series: Series, value: float, time_ns: int) -> int | None:
        """Add a logged value, and say at what time it stands; None where it is not to be sent.

        Times of a series grow by a millisecond at least. A value that would stand too late for
        that is shown as the last one, and is no point of its history.
        """
        series.value = value
        late_ns = series.time_ns + MS - time_ns
        if 0 < late_ns <= _MOST_LATE_NS:
            time_ns += late_ns
        elif 0 < late_ns <= _REFUSED_NS:
            return None
        series.time_ns = time_ns
        if self.keep_history:
            if series.history is None:
                series.history = []
            if len(series.history) >= _MOST_POINTS:
                del series.history[: _MOST_POINTS // 10]
                self.points_dropped += _MOST_POINTS // 10
            series.history.append((time_ns, value))
        return time_ns

    def drop(self, labels: Labels) -> None:
        """Forget every series whose attributes begin with these."""
        length = len(labels)
        for family in self._families.values():
            for key in [key for key in family if key[:length] == labels]:
                del family[key]

    def forget(self, series: Series) -> None:
        """Forget one series; nothing if another one has taken its place."""
        family = self._families.get(series.metric.name, {})
        if family.get(series.labels) is series:
            del family[series.labels]

    def families(self) -> Iterator[tuple[Metric, list[Series]]]:
        """Every metric that has a value, with its series."""
        for family in self._families.values():
            filled = [series for series in family.values() if series.value is not None]
            if filled:
                yield filled[0].metric, filled


def is_logged(metric: Metric) -> bool:
    """Whether a metric's points are logged values, each with a time of its own."""
    return metric.kind is Kind.GAUGE and metric.section == "Learning"
