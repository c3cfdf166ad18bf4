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
from otel_ddp.history.tables import (
    STEP_COLUMNS,
    SUM_COLUMNS,
    Event,
    SeriesKey,
    StepSum,
    ValueSum,
)

# Buckets of all series of a run together, about 100 MB; each series has a share, within bounds.
# Those of a run on several nodes have as much for each node, up to four times as much.
_MOST_BUCKETS, _MOST_SHARES = 1_000_000, 4
MOST_OF_SERIES, _FEWEST_OF_SERIES = 4096, 64
_MOST_SERIES = 20_000
_MOST_EVENTS = 20_000
# A file system without locks answers as if another process had one.
_BUSY_S = 1.0
_NEVER = 1 << 63

# What becomes of a bucket that is there already: each column, old and new. min() and max() of
# SQLite are NULL where one side is.
_ADDED = "{0} = {0} + excluded.{0}"
_LOWEST = "{0} = min(coalesce({0}, excluded.{0}), coalesce(excluded.{0}, {0}))"
_HIGHEST = "{0} = max(coalesce({0}, excluded.{0}), coalesce(excluded.{0}, {0}))"
_LATEST = "{0} = CASE WHEN excluded.last_ns >= last_ns THEN excluded.{0} ELSE {0} END"
_RULES = {
    **dict.fromkeys(("first", "first_ns", "low", "low_ns"), _LOWEST),
    **dict.fromkeys(("until", "last_ns", "high", "high_ns"), _HIGHEST),
    **dict.fromkeys(("last", "epoch"), _LATEST),
}


class Unusable(ValueError):
    """The file is of a later version, or another program's."""


class Table:
    """Of buckets: sums of values, or steps."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self.name = name
        marks = ", ".join("?" * (len(columns) + 2))
        # Of each column: old and new together.
        updates = ", ".join(_RULES.get(column, _ADDED).format(column) for column in columns)
        named = f"INTO {name} (series, start, {', '.join(columns)})"
        conflict = f"ON CONFLICT (series, start) DO UPDATE SET {updates}"
        self.upsert = f"INSERT {named} VALUES ({marks}) {conflict}"
        # Of each bucket that does not begin a wider one: added to the one that does.
        others = f"FROM {name} WHERE series = :series AND start % :width <> 0"
        self.sum_up = (
            f"INSERT {named} SELECT series, start - start % :width, {', '.join(columns)} "
            f"{others} {conflict}"
        )
        self.delete_summed_up = f"DELETE {others}"
        # A wide bucket may hold steps before those that are done again.
        self.delete_abandoned = (
            f"DELETE FROM {name} WHERE series = :series AND start > :step - :width "
            "AND first >= :step AND last_ns < :attempt_ns"
        )


_SUMS, _STEPS = Table("sums", SUM_COLUMNS), Table("steps", STEP_COLUMNS)


@dataclass(slots=True)
class OpenSeries:
    """A series as it is while its file is open."""

    id: int
    width: int
    buckets: int


class RunFile:
    """Opened for one run; `write` is one transaction."""

    def __init__(self, path: Path) -> None:
        """Make the file, or go on with it; raises sqlite3.Error, OSError or Unusable.

        SQLite opens paths by itself, so no other user may be able to write into the directory.
        """
        self.path = path
        self.nodes = 1
        """Of how many nodes it has ranks."""
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
        for id, kind, name, rank, labels, width in execute(
            "SELECT id, kind, name, rank, labels, width FROM series"
        ).fetchall():
            key = SeriesKey(kind, name, rank, tuple(map(tuple, files.parse_json(labels))))
            # Counted when it is written to.
            self._series[key] = OpenSeries(id, width, MOST_OF_SERIES)

    def _check_version(self) -> int:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version > tables.VERSION:
            raise Unusable(f"{self.path.name} is of a later version ({version})")
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

    def width(self, key: SeriesKey) -> int:
        """How wide its buckets are: what is summed up beforehand costs one row each."""
        found = self._series.get(key)
        return 1 if found is None else found.width

    def last(self, key: SeriesKey) -> int:
        """The highest step of a logged name; -1 if it has none."""
        (last,) = self._db.execute(
            "SELECT max(until) FROM sums WHERE series = "
            "(SELECT id FROM series WHERE kind = ? AND name = ? AND rank = ? AND labels = ?)",
            (key.kind, key.name, key.rank, json.dumps(key.labels)),
        ).fetchone()
        return -1 if last is None else int(last)

    def write(
        self,
        *,
        values: Mapping[SeriesKey, Mapping[int, ValueSum]] = {},
        steps: Mapping[SeriesKey, Mapping[int, StepSum]] = {},
        about: Mapping[str, Any] = {},
        ranks: Mapping[str, Mapping[str, Any]] = {},
        events: Iterable[Event] = (),
        verdicts: Iterable[Mapping[str, Any]] = (),
        positions: Mapping[str, tuple[int, int, int]] = {},
        attempt_ns: int = 0,
        next_ns: int = 0,
    ) -> None:
        """Add all this, or nothing: raises sqlite3.Error.

        *attempt_ns*: when its attempt began; what an earlier one did from its first step on goes.
        *next_ns*: when the next one began; what that one has done again is not added.
        """
        with self._transaction():
            self._add(_SUMS, values, attempt_ns, next_ns)
            self._add(_STEPS, steps, attempt_ns, next_ns)
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

    def _add(
        self,
        table: Table,
        sums: Mapping[SeriesKey, Mapping[int, ValueSum | StepSum]],
        attempt_ns: int,
        next_ns: int,
    ) -> None:
        rows: list[tuple[Any, ...]] = []
        touched = []
        for key, buckets in sums.items():
            series = self._series.get(key) or self._make(key)
            if series is None:
                continue
            id, width = series.id, series.width
            if next_ns:
                again_from = self._again_from(table, id, next_ns)
                buckets = {
                    start: each
                    for start, each in buckets.items()
                    if each.first < again_from or each.last_ns >= next_ns
                }
            if new := [each.first for each in buckets.values() if each.last_ns >= attempt_ns > 0]:
                again = {"series": id, "width": width, "step": min(new), "attempt_ns": attempt_ns}
                self._db.execute(table.delete_abandoned, again)
            rows += [(id, start - start % width, *each.row()) for start, each in buckets.items()]
            # Counted as if all were new; the exact number is asked for when it matters.
            series.buckets += len(buckets)
            touched.append(series)
        # One call for all series: a run may have thousands.
        self._db.executemany(table.upsert, rows)
        share = self._shares * _MOST_BUCKETS // max(len(self._series), 1)
        most = max(_FEWEST_OF_SERIES, min(MOST_OF_SERIES, share))
        for series in touched:
            if series.buckets > most:
                count = f"SELECT count(*) FROM {table.name} WHERE series = ?"
                series.buckets = self._db.execute(count, (series.id,)).fetchone()[0]
                if series.buckets > most:
                    self._widen(table, series, most * 3 // 4)

    def _again_from(self, table: Table, series: int, attempt_ns: int) -> int:
        """The first step of a series since an attempt began."""
        query = f"SELECT min(first) FROM {table.name} WHERE series = ? AND last_ns >= ?"
        (first,) = self._db.execute(query, (series, attempt_ns)).fetchone()
        return _NEVER if first is None else int(first)

    @property
    def _shares(self) -> int:
        return min(self.nodes, _MOST_SHARES)

    def _make(self, key: SeriesKey) -> OpenSeries | None:
        most = self._shares * _MOST_SERIES
        self._db.execute(
            "INSERT OR IGNORE INTO series (kind, name, rank, labels, width) "
            "SELECT ?, ?, ?, ?, 1 WHERE (SELECT count(*) FROM series) < ?",
            (key.kind, key.name, key.rank, json.dumps(key.labels), most),
        )
        row = self._db.execute(
            "SELECT id, width FROM series WHERE kind = ? AND name = ? AND rank = ? AND labels = ?",
            (key.kind, key.name, key.rank, json.dumps(key.labels)),
        ).fetchone()
        if row is None:
            errors.warn_once(
                f"series of {self.path}",
                "The history %s has %d series: further ones are not kept.",
                self.path,
                most,
            )
            return None
        found = self._series[key] = OpenSeries(row[0], row[1], MOST_OF_SERIES)
        return found

    def _widen(self, table: Table, series: OpenSeries, most: int) -> None:
        """Sum up neighbours until no more than *most* buckets are left."""
        query = f"SELECT start FROM {table.name} WHERE series = ?"
        starts = [start for (start,) in self._db.execute(query, (series.id,))]
        width = series.width
        while len({start - start % width for start in starts}) > most:
            width *= 2
        wider = {"series": series.id, "width": width}
        self._db.execute(table.sum_up, wider)
        self._db.execute(table.delete_summed_up, wider)
        self._db.execute("UPDATE series SET width = :width WHERE id = :series", wider)
        series.width, series.buckets = width, most

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
