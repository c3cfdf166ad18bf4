"""The summary of a rank in a file beside its journal, for the next agent and for people."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from otel_ddp.agent.reading.summary import Extremes, Key, Point, Summary
from otel_ddp.errors import foreign_json
from otel_ddp.journal import layout
from otel_ddp.journal.direction import direction
from otel_ddp.journal.reader import JournalReader, clean_text

# Larger than 200 names of the longest kind.
_MOST_BYTES = 1024 * 1024


class SummaryFile:
    """One a journal.

    It is written before the values that it holds are committed. An agent that is killed in between
    leaves values to be read again, which change nothing.
    """

    def __init__(self, journal: Path) -> None:
        self._path = journal.with_suffix(layout.SUMMARY_SUFFIX)
        self._kept = 0

    def restore(self, summary: Summary) -> None:
        """Take into account what an earlier agent has written."""
        for key, extremes in read(self._path):
            for point in (extremes.lowest, extremes.highest):
                summary.feed(key, *point)

    def keep(self, summary: Summary) -> None:
        """Write the summary if it has changed."""
        if summary.version == self._kept:
            return
        self._kept = summary.version
        content = [[*key, *extremes.lowest, *extremes.highest] for key, extremes in summary.items()]
        half = self._path.with_suffix(f"{layout.SUMMARY_SUFFIX}.half")
        # A full or deleted directory: only the next agent would need the file.
        with contextlib.suppress(OSError):
            half.write_text(json.dumps(content))
            half.replace(self._path)


def described(reader: JournalReader) -> list[dict[str, Any]]:
    """The summary of a process for people, with its last values; empty where none was kept."""
    last: dict[Key, Point] = {}
    for record in reader.latest():
        for number, value in record.values:
            if (name := reader.names.get(number)) is not None:
                known = last.get(name)
                if known is None or record.time_ns >= known.time_ns:
                    last[name] = Point(value, record.step, record.time_ns)
    best = reader.facts.get("best")
    chosen = best if isinstance(best, dict) else {}
    return [
        {
            "name": key[0],
            "split": key[1],
            "direction": direction(key[0], chosen),
            "last": _point(last.get(key)),
            "min": _point(extremes.lowest),
            "max": _point(extremes.highest),
        }
        for key, extremes in read(reader.path.with_suffix(layout.SUMMARY_SUFFIX))
    ]


def _point(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else point._asdict()


def read(path: Path) -> Iterator[tuple[Key, Extremes]]:
    """What is in such a file; nothing of a damaged one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        content = foreign_json.parse(os.read(fd, _MOST_BYTES))
    except (OSError, ValueError):
        return
    finally:
        os.close(fd)
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
