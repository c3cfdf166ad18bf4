"""Writes the history of one run. One thread at a time; several processes may have the file open."""

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

# Buckets of all series of a run together, about 200 MB; each series has a share, within bounds.
_MOST_BUCKETS = 2_000_000
MOST_OF_SERIES, _FEWEST_OF_SERIES = 4096, 64
_MOST_SERIES = 40_000
_MOST_EVENTS = 20_000
# A file system without locks answers as if another process had one.
_BUSY_S = 1.0
_SERIES = "kind = ? AND name = ? AND rank = ? AND labels = ?"


class Unusable(ValueError):
    """The file is of another version, or another program's."""


@dataclass(slots=True)
class OpenSeries:
    """A series as it is while its file is open."""

    id: int
    form: Form
    width: int
    buckets: int


class RunFile:
    """Opened for one run; `write` is one transaction."""

    def __init__(self, path: Path) -> None:
        """Make the file, or go on with it; raises sqlite3.Error, OSError or Unusable.

        SQLite opens paths by itself, so no other user may be able to write into the directory.
        """
        self.path = path
        self._series: dict[SeriesKey, OpenSeries] = {}
        with contextlib.suppress(FileExistsError):
            # Closed to others from its first moment. Not opened where it is there already: closing
            # it would take the locks that SQLite holds for a thread that reads it.
            os.close(files.create(path))
        self._status = files.check_own(path)
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
        # A killed agent or a full disk cannot damage it; a power cut may cost the last seconds.
        execute("PRAGMA synchronous = NORMAL")
        # Blocks at the end of each series alone are read again: 256 KiB instead of 2 MiB.
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
        # Readers then never make us wait. Where a file system lacks what it needs, it stays as is.
        # Only now: in a write-ahead log the mark of a new file would stand beside it at first.
        execute("PRAGMA journal_mode = WAL")

    def _check_version(self) -> int:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, tables.VERSION):
            raise Unusable(f"{self.path.name} is of another version ({version})")
        (count,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if count and not tables.is_as_we_made_it(self._db):
            raise Unusable(f"{self.path.name} is a database of another program")
        return version

    def is_there(self) -> bool:
        """Whether its name leads to it: else what is written goes with the last open file."""
        try:
            return os.path.samestat(os.lstat(self.path), self._status)
        except FileNotFoundError:
            return False

    def put_back(self) -> None:
        """Make the file again whose name was removed, unless another one is there by now."""
        with contextlib.suppress(FileExistsError):
            os.close(files.create(self.path))
            with contextlib.closing(sqlite3.connect(self.path)) as new:
                self._db.backup(new)

    def close(self) -> None:
        """Leave one file that can be copied."""
        try:
            self._db.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error:
            pass  # somebody reads it: the other files stay beside it, and belong to it
        finally:
            self._db.close()

    def read_positions(self) -> dict[str, tuple[int, int, int]]:
        """How far each journal was read: records, and steps by the host's and device's clock."""
        rows = self._db.execute("SELECT journal, position, host_ns, device_ns FROM journals")
        return {journal: (position, host, device) for journal, position, host, device in rows}

    def gaps(self) -> list[dict[str, Any]]:
        """When nothing could be kept."""
        return list(self._about("gaps") or [])

    def began_ns(self) -> int:
        """When the first process began that is in it; 0 if none is."""
        found = self._about("began_ns")
        return found if isinstance(found, int) else 0

    def kept_nodes(self) -> dict[str, int]:
        """Of the other nodes with ranks in it: when the first process of each began."""
        return dict(self._about("nodes") or {})

    def kept_time(self) -> dict[str, Any]:
        """What its attempts were, and what their time went to."""
        return {key: self._about(key) for key in ("time", "attempts")}

    def kept_ranks(self) -> list[dict[str, Any]]:
        """The last process of each rank."""
        rows = self._db.execute("SELECT about FROM ranks").fetchall()
        return [files.parse_json(text) for (text,) in rows]

    def change(self, texts: Mapping[str, str]) -> None:
        """Of a person: beside what the program has said, which an agent may write again."""
        self.write(about={"changed": {**(self._about("changed") or {}), **texts}})

    def _about(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return files.parse_json(row[0]) if row else None

    def last(self, key: SeriesKey) -> int:
        """The highest step of a logged name; -1 if it has none."""
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
        """Add all this, or nothing: raises sqlite3.Error, or OverflowError.

        *rows*: of each series, buckets of a value or a step each, or of several.
        *attempt_ns*: when the newest attempt began; what earlier ones did from its first step on
        goes, or is not added.
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
            # The disk may be so full that SQLite has rolled back by itself.
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
            # A wide bucket may hold steps before those that are done again.
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
        """The buckets in the blocks from *first* to *until*."""
        columns = series.form.load(self._db, (series.id, series.width), first, until)
        return [*zip(*columns, strict=True)]

    def _store(self, series: OpenSeries, rows: list[Row]) -> int:
        """Write all buckets of some blocks; how many there are."""
        merged = series.form.merged(rows, series.width)
        self._db.executemany(
            "INSERT INTO blocks (series, start, count, first_ns, content) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET count = excluded.count, first_ns = excluded.first_ns, "
            "content = excluded.content",
            [(series.id, *block) for block in series.form.blocks(merged, series.width)],
        )
        return len(merged[FIRST])

    def _delete(self, series: OpenSeries, first: int = -FAR) -> None:
        """Delete the blocks from *first* on."""
        start = first - first % (series.width * BLOCK)
        self._db.execute("DELETE FROM blocks WHERE series = ? AND start >= ?", (series.id, start))

    def _widen(self, series: OpenSeries, most: int) -> None:
        """Sum up neighbours until no more than *most* buckets are left."""
        rows = self._load(series)
        self._delete(series)
        while len({row[FIRST] // series.width for row in rows}) > most:
            series.width *= 2
        series.buckets = self._store(series, rows)
        self._db.execute("UPDATE series SET width = ? WHERE id = ?", (series.width, series.id))

    def _count_series(self) -> int:
        # None is ever deleted.
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
        self._db.execute(
            "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(id, verdict["kind"], str(who.get("rank", "")), verdict["phase"]),
                *(verdict["step"], verdict["since_ns"], verdict.get("until_ns")),
                *(verdict["sentence"], json.dumps(verdict)),
            ),
        )


def _named(key: SeriesKey) -> tuple[str, str, str, str]:
    """Its columns in the table of series."""
    return key.kind, key.name, key.rank, json.dumps(key.labels)
