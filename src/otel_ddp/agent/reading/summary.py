"""The lowest and the highest value of each name that a rank has logged, over all its attempts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.agent.ledger import Labels, Ledger, Series
from otel_ddp.journal import layout
from otel_ddp.journal.direction import direction
from otel_ddp.journal.reader import JournalReader, clean_text
from otel_ddp.vocabulary import catalog

# A name and its split.
Key = tuple[str, str]

# Beyond it a name has no summary: this much is written again whenever an extreme changes.
MOST_NAMES = 200
# Larger than 200 names of the longest kind.
_MOST_BYTES = 1024 * 1024


class Point(NamedTuple):
    """One logged value."""

    value: float
    step: int | None
    time_ns: int


class Extremes(NamedTuple):
    """Those of one name and split; the first of several equal values counts."""

    lowest: Point
    highest: Point


class Summary:
    """One a rank. The caller of every method holds the ledger's lock."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change."""
        self.extremes: dict[Key, Extremes] = {}
        """Of each name and split, in the order in which they came."""

    def feed(self, key: Key, value: float, step: int | None, time_ns: int) -> None:
        """Take a value into account; one that comes again changes nothing."""
        known = self.extremes.get(key)
        # Most values end here. NaN does as well, if the name is known.
        if known is not None and not (value < known.lowest.value or value > known.highest.value):
            return
        if not isfinite(value) or (known is None and len(self.extremes) >= MOST_NAMES):
            return
        point = Point(value, step, time_ns)
        if known is None:
            self.extremes[key] = Extremes(point, point)
        elif value < known.lowest.value:
            self.extremes[key] = known._replace(lowest=point)
        else:
            self.extremes[key] = known._replace(highest=point)
        self.version += 1


class Summaries:
    """Those of all ranks of this node: a rank that is started again goes on with its summary."""

    def __init__(self) -> None:
        self._summaries: dict[Labels, Summary] = {}

    def of(self, labels: Labels) -> Summary:
        """The summary of the rank with these labels, made at its first use."""
        return self._summaries.setdefault(labels, Summary())

    def forget(self, labels: Labels) -> None:
        """Forget a rank whose series are dropped."""
        self._summaries.pop(labels, None)


class SummaryOfJournal:
    """What one process adds to the summary of its rank, the file beside it, and its series.

    The file is written before the values that it holds are committed. An agent that is killed in
    between leaves values to be read again, which change nothing. The caller of every method holds
    the ledger's lock.
    """

    def __init__(self, reader: JournalReader, ledger: Ledger, summaries: Summaries) -> None:
        self._reader = reader
        self._ledger = ledger
        self._summaries = summaries
        # Of rank 0 alone: 2 series a name are little for one rank, and much for thousands.
        self._summary: Summary | None = None
        self._labels: Labels = ()
        self._kept = 0
        self._shown: set[tuple[catalog.Metric, Labels]] = set()

    def relabel(self, labels: Labels) -> None:
        """Go on with the rank that has these labels."""
        identity = self._reader.identity
        self._labels = labels
        has_one = identity.get("exported") and identity.get("global_rank") == 0
        self._summary = self._summaries.of(labels) if has_one else None

    def restore(self) -> None:
        """Take into account what an earlier agent has written."""
        if self._summary is not None:
            for key, extremes in _read(self._reader):
                for point in extremes:
                    self._summary.feed(key, *point)

    def feed(self, key: Key, value: float, step: int | None, time_ns: int) -> None:
        """Take a value into account."""
        if self._summary is not None:
            self._summary.feed(key, value, step, time_ns)

    def keep(self) -> None:
        """Write down, for the next agent and for people, what has changed."""
        summary = self._summary
        if summary is None or summary.version == self._kept:
            return
        self._kept = summary.version
        content = [[*key, *low, *high] for key, (low, high) in summary.extremes.items()]
        # A full or deleted directory: only the next agent would need the file.
        with contextlib.suppress(OSError):
            files.replace(_path(self._reader), json.dumps(content))

    def update_series(self, now_ns: int) -> None:
        """Write the best values into the ledger."""
        if self._summary is None:
            return
        chosen = _directions(self._reader)
        shown = set()
        for (name, split), extremes in self._summary.extremes.items():
            way = direction(name, chosen)
            if not way:
                continue
            best = extremes.lowest if way == "min" else extremes.highest
            labels = (*self._labels, ("name", name), ("split", split), ("direction", way))
            for metric, value in (
                (catalog.TRAINING_SCALAR_BEST, best.value),
                (catalog.TRAINING_SCALAR_BEST_STEP, best.step),
            ):
                if value is not None:
                    series = self._series(metric, labels)
                    series.value, series.time_ns = float(value), now_ns
                    shown.add((metric, labels))
        # The user may say another direction, and a value that is better may have no step.
        for metric, labels in self._shown - shown:
            self._ledger.forget(self._series(metric, labels))
        self._shown = shown

    def _series(self, metric: catalog.Metric, labels: Labels) -> Series:
        project = str(self._reader.identity.get("project") or "")
        return self._ledger.series(metric, labels, self._reader.created_ns, project)


def last_values(reader: JournalReader) -> dict[Key, Point]:
    """The last value of each name and split."""
    last: dict[Key, Point] = {}
    for record in reader.latest():
        for number, value in record.values:
            if (name := reader.names.get(number)) is not None:
                known = last.get(name)
                if known is None or record.time_ns >= known.time_ns:
                    last[name] = Point(value, record.step, record.time_ns)
    return last


def described(reader: JournalReader) -> list[dict[str, Any]]:
    """The summary of a process for people, with its last values; empty where none was kept."""
    last = last_values(reader)
    chosen = _directions(reader)
    return [
        {
            "name": key[0],
            "split": key[1],
            "direction": direction(key[0], chosen),
            "last": last[key]._asdict() if key in last else None,
            "min": extremes.lowest._asdict(),
            "max": extremes.highest._asdict(),
        }
        for key, extremes in _read(reader)
    ]


def _directions(reader: JournalReader) -> dict[str, Any]:
    """What the user says of names whose direction is not guessed."""
    best = reader.facts.get("best")
    return best if isinstance(best, dict) else {}


def _path(reader: JournalReader) -> Path:
    return reader.path.with_suffix(layout.SUMMARY_SUFFIX)


def _read(reader: JournalReader) -> Iterator[tuple[Key, Extremes]]:
    """What is in the file beside a journal; nothing of a damaged one."""
    content = files.read_json(_path(reader), _MOST_BYTES)
    for row in content if isinstance(content, list) else ():
        if _is_row(row):
            name, split, *points = row
            yield (name, split), Extremes(Point(*points[:3]), Point(*points[3:]))


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 8:
        return False
    texts, points = row[:2], (row[2:5], row[5:8])
    return all(map(_is_clean, texts)) and all(
        isinstance(value, float) and (step is None or _is_word(step)) and _is_word(time_ns)
        for value, step, time_ns in points
    )


def _is_clean(text: Any) -> bool:
    """Whether it can be a label as it is, like every text that a journal gives."""
    return isinstance(text, str) and clean_text(text.encode(errors="replace")) == text


def _is_word(number: Any) -> bool:
    """Whether a journal can hold it: a larger one is no float, either."""
    return isinstance(number, int) and abs(number) < 1 << 63
