"""Writes the history of one run. Not thread-safe, but several processes may have the file open."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.history import tables
from otel_ddp.history.buckets import BLOCK, FAR, FIRST, LAST_NS, UNTIL, Form, Row, form_of
from otel_ddp.history.tables import Event, SeriesKey

# The file of a run has at most this many buckets, about 200 MB. Each series may have an equal share
# of them, within the bounds below.
_MOST_BUCKETS = 2_000_000
MOST_OF_SERIES, _FEWEST_OF_SERIES = 4096, 64
_MOST_SERIES = 40_000
_MOST_EVENTS = 20_000
# How long to wait while another process locks the file. On a file system that does not support
# locks, SQLite always reports a locked file.
_BUSY_S = 1.0
_SERIES = "kind = ? AND name = ? AND rank = ? AND labels = ?"


class Unusable(ValueError):
    """The file is of another version or another program."""


@dataclass(slots=True)
class OpenSeries:
    """A series of an open file, with the number of its buckets."""

    id: int
    form: Form
    width: int
    buckets: int


class RunFile:
    """The history file of one run."""

    def __init__(self, path: Path) -> None:
        """Create or open the file; raises sqlite3.Error, OSError or Unusable.

        SQLite opens by path, so no other user may have write access to the directory.
        """
        self.path = path
        self._series: dict[SeriesKey, OpenSeries] = {}
        with contextlib.suppress(FileExistsError):
            # Create the file so that only this user can read it. Never open an existing file here:
            # closing it would release the locks that SQLite holds for another thread.
            os.close(files.create(path))
        files.check_own(path)
        self._db = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        execute = self._db.execute
        self._check_version()
        # With this setting, neither a killed agent nor a full disk damages the file. A power cut
        # may lose the last seconds.
        execute("PRAGMA synchronous = NORMAL")
        # The writer reads only the last blocks of each series, so a cache of 256 KiB suffices.
        execute("PRAGMA cache_size = -256")
        execute("BEGIN IMMEDIATE")
        try:
            if not self._check_version():
                for statement in filter(str.strip, tables.TABLES.split(";")):
                    execute(statement)
                execute(f"PRAGMA application_id = {tables.APPLICATION}")
                execute(f"PRAGMA user_version = {tables.VERSION}")
        except BaseException:
            execute("ROLLBACK")
            raise
        execute("COMMIT")
        # With a write-ahead log, readers do not block the writer. On file systems that do not
        # support it, SQLite ignores this. The log starts after the commit above, so that the
        # application id is in the file itself, where `is_history` reads it.
        execute("PRAGMA journal_mode = WAL")

    def _check_version(self) -> int:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, tables.VERSION):
            raise Unusable(f"{self.path.name} is of another version ({version})")
        (count,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if count and not tables.is_as_we_made_it(self._db):
            raise Unusable(f"{self.path.name} is a database of another program")
        return version

    def put_back(self) -> None:
        """Write the file again after someone removed it, unless a new file has its path."""
        with contextlib.suppress(FileExistsError):
            os.close(files.create(self.path))
            with contextlib.closing(sqlite3.connect(self.path)) as new:
                self._db.backup(new)

    def close(self) -> None:
        """Close the database, and leave a single file that can be copied."""
        try:
            self._db.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error:
            pass  # another process reads the file: its write-ahead log stays
        finally:
            self._db.close()

    def read_positions(self) -> dict[str, tuple[int, int, int]]:
        """For each journal: its position, and the ends of its last host and device steps.

        The records before the position have been read, and are in this file.
        """
        rows = self._db.execute("SELECT journal, position, host_ns, device_ns FROM journals")
        return {journal: (position, host, device) for journal, position, host, device in rows}

    def about(self, key: str) -> Any:
        """A property of the run; None if it is not set."""
        row = self._db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return files.parse_json(row[0]) if row else None

    def last(self, key: SeriesKey) -> int:
        """The highest step of a series; -1 if it has no steps."""
        series = self._find(key)
        rows = [] if series is None else self._load(series)
        return max((row[UNTIL] for row in rows), default=-1)

    def write(
        self,
        *,
        rows: Mapping[SeriesKey, Sequence[Row]] = {},
        about: Mapping[str, Any] = {},
        ranks: Mapping[str, Mapping[str, Any]] = {},
        events: Iterable[Event] = (),
        verdicts: Iterable[Mapping[str, Any]] = (),
        positions: Mapping[str, tuple[int, int, int]] = {},
        attempt_ns: int = 0,
    ) -> None:
        """Write in one transaction; raises sqlite3.Error or OverflowError.

        *rows*: new buckets of each series. *attempt_ns*: the start of the newest attempt, or 0. The
        steps of earlier attempts are deleted from the first step of the newest attempt on.
        """
        with self._transaction():
            for key, of_series in rows.items():
                self._add(key, of_series, attempt_ns)
            self._put("about", "key", "value", about)
            self._put("ranks", "rank", "about", ranks)
            self._db.executemany(
                "INSERT OR REPLACE INTO journals VALUES (?, ?, ?, ?)",
                [(journal, *marks) for journal, marks in positions.items()],
            )
            self._add_events(events)
            for each in verdicts:
                self._put_verdict(each)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            # If the disk is full, SQLite may have rolled back by itself. A second ROLLBACK would
            # fail.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._series.clear()
            raise
        self._db.execute("COMMIT")

    def _add(self, key: SeriesKey, rows: Sequence[Row], attempt_ns: int) -> None:
        series = self._series.get(key) or self._make(key)
        if series is None or not rows:
            return
        firsts = [row[FIRST] for row in rows]
        first, until = min(firsts), max(firsts)
        if attempt_ns:
            is_late = any(row[LAST_NS] < attempt_ns for row in rows)
            first, until = -FAR if is_late else first, FAR
        old = self._load(series, first, until)
        kept = [*old, *rows]
        if attempt_ns:
            # The newest attempt makes the steps from `again_from` on once more. From earlier
            # attempts, keep only the buckets that begin before this step.
            new = (row[FIRST] for row in kept if row[LAST_NS] >= attempt_ns)
            again_from = min(new, default=FAR)
            kept = [row for row in kept if row[FIRST] < again_from or row[LAST_NS] >= attempt_ns]
            self._delete(series, first)
        series.buckets += self._store(series, kept) - len(old)
        share = _MOST_BUCKETS // self._count_series()
        most = max(_FEWEST_OF_SERIES, min(MOST_OF_SERIES, share))
        if series.buckets > most:
            self._widen(series, most * 3 // 4)

    def _load(self, series: OpenSeries, first: int = -FAR, until: int = FAR) -> list[Row]:
        """All buckets of the blocks with steps from *first* to *until*."""
        columns = series.form.load(self._db, (series.id, series.width), first, until)
        return [*zip(*columns, strict=True)]

    def _store(self, series: OpenSeries, rows: list[Row]) -> int:
        """Merge buckets and write them as whole blocks, which replace stored blocks.

        Returns the number of buckets after the merge.
        """
        merged = series.form.merged(rows, series.width)
        self._db.executemany(
            "INSERT INTO blocks (series, start, count, first_ns, content) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET count = excluded.count, first_ns = excluded.first_ns, "
            "content = excluded.content",
            [(series.id, *block) for block in series.form.blocks(merged, series.width)],
        )
        return len(merged[FIRST])

    def _delete(self, series: OpenSeries, first: int = -FAR) -> None:
        """Delete the block with the step *first*, and all later blocks of the series."""
        start = first - first % (series.width * BLOCK)
        self._db.execute("DELETE FROM blocks WHERE series = ? AND start >= ?", (series.id, start))

    def _widen(self, series: OpenSeries, most: int) -> None:
        """Double the width of the buckets until the series has at most *most* buckets."""
        rows = self._load(series)
        self._delete(series)
        while len({row[FIRST] // series.width for row in rows}) > most:
            series.width *= 2
        series.buckets = self._store(series, rows)
        self._db.execute("UPDATE series SET width = ? WHERE id = ?", (series.width, series.id))

    def _count_series(self) -> int:
        # Series are never deleted, so the highest id is their number.
        (count,) = self._db.execute("SELECT max(id) FROM series").fetchone()
        return int(count or 0)

    def _find(self, key: SeriesKey) -> OpenSeries | None:
        row = self._db.execute(
            "SELECT id, width, (SELECT coalesce(sum(count), 0) FROM blocks WHERE series = id) "
            f"FROM series WHERE {_SERIES}",
            _named(key),
        ).fetchone()
        return None if row is None else OpenSeries(row[0], form_of(key.kind), row[1], row[2])

    def _make(self, key: SeriesKey) -> OpenSeries | None:
        found = self._find(key)
        if found is None and self._count_series() < _MOST_SERIES:
            self._db.execute(
                "INSERT INTO series (kind, name, rank, labels, width) VALUES (?, ?, ?, ?, 1)",
                _named(key),
            )
            found = self._find(key)
        if found is None:
            errors.warn_once(
                f"series of {self.path}",
                "The history %s has %d series: further ones are not kept.",
                self.path,
                _MOST_SERIES,
            )
            return None
        self._series[key] = found
        return found

    def _put(self, table: str, key: str, column: str, content: Mapping[str, Any]) -> None:
        self._db.executemany(
            f"INSERT OR REPLACE INTO {table} ({key}, {column}) VALUES (?, ?)",
            [(name, json.dumps(value)) for name, value in content.items()],
        )

    def _add_events(self, events: Iterable[Event]) -> None:
        self._db.executemany(
            "INSERT INTO events (time_ns, step, rank, name, severity, body, attributes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*each[:-1], json.dumps(each.attributes)) for each in events],
        )
        self._db.execute(
            "DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (_MOST_EVENTS,)
        )

    def _put_verdict(self, verdict: Mapping[str, Any]) -> None:
        who = verdict.get("who") or {}
        id = f"{verdict['kind']} {json.dumps(who, sort_keys=True)} {verdict['since_ns']}"
        when = verdict["step"], verdict["since_ns"], verdict.get("until_ns")
        row = id, verdict["kind"], str(who.get("rank", "")), verdict["phase"], *when
        self._db.execute(
            "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, verdict["sentence"], json.dumps(verdict)),
        )


def _named(key: SeriesKey) -> tuple[str, str, str, str]:
    """The columns that identify a series."""
    return key.kind, key.name, key.rank, json.dumps(key.labels)
