"""The tables of a history: one SQLite file of a run on a node.

Neighbouring steps or values are aggregated into buckets, each with its lowest, highest and last
value. A series that outgrows its share gets buckets twice as wide, so a file stays small however
long its run is. docs/history.md describes the tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from otel_ddp import files

VERSION: Final = 2
"""The version of our tables, in SQLite's `user_version`. A reader refuses other versions."""
# SQLite's application_id: "oddp".
APPLICATION: Final = 0x6F646470
SUFFIX: Final = ".sqlite"
# Suffixes of SQLite's files beside an open database.
_BESIDE = ("-wal", "-shm", "-journal")
# The first bytes of a SQLite file, and the offset of its application id.
_MAGIC, _APPLICATION_AT = b"SQLite format 3\0", 68

TABLES: Final = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ranks (rank TEXT PRIMARY KEY, about TEXT NOT NULL);
CREATE TABLE journals (
  journal TEXT PRIMARY KEY, position INTEGER NOT NULL, host_ns INTEGER NOT NULL,
  device_ns INTEGER NOT NULL
);
CREATE TABLE series (
  id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, rank TEXT NOT NULL,
  labels TEXT NOT NULL, width INTEGER NOT NULL, UNIQUE (kind, name, rank, labels)
);
CREATE TABLE blocks (
  series INTEGER NOT NULL, start INTEGER NOT NULL, count INTEGER NOT NULL,
  first_ns INTEGER NOT NULL, content BLOB NOT NULL, UNIQUE (series, start)
);
CREATE TABLE events (
  id INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, step INTEGER, rank TEXT NOT NULL,
  name TEXT NOT NULL, severity TEXT NOT NULL, body TEXT NOT NULL, attributes TEXT NOT NULL
);
CREATE TABLE verdicts (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, rank TEXT NOT NULL, phase TEXT NOT NULL,
  step INTEGER, since_ns INTEGER NOT NULL, until_ns INTEGER, sentence TEXT NOT NULL,
  about TEXT NOT NULL
);
"""


def is_history(path: Path) -> bool:
    """Whether the application id of a file is ours. Raises OSError.

    Reads the bytes itself, since SQLite would create files beside the file. Follows no links, and
    opens no fifos.
    """
    head = files.read(path, _APPLICATION_AT + 4)
    return head.startswith(_MAGIC) and head[_APPLICATION_AT:] == APPLICATION.to_bytes(4, "big")


def beside(path: Path) -> Iterator[Path]:
    """The paths that SQLite opens together with a database."""
    return (path.with_name(path.name + suffix) for suffix in _BESIDE)


def is_as_we_made_it(database: sqlite3.Connection) -> bool:
    """Whether the database has exactly our tables. Raises sqlite3.Error.

    A foreign file could have a view instead of a table, and a query of the view might never end.
    """
    return _schema(database) == _own_schema()


def _schema(database: sqlite3.Connection) -> list[tuple[Any, ...]]:
    # A foreign database may have very many tables: the limit keeps this query short.
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100"
    return sorted(database.execute(query).fetchall(), key=repr)


@cache
def _own_schema() -> list[tuple[Any, ...]]:
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(TABLES)
        return _schema(database)
    finally:
        database.close()


# Group and name of a run.
RunKey = tuple[str, str]


class SeriesKey(NamedTuple):
    """Identifies a series."""

    kind: str
    """`value`: logged values; `steps`: a rank's steps (`name`: the clock, host or device); `node`,
    `counter`: a gauge or a counter of the node, of a device or of a process."""
    name: str
    rank: str = ""
    labels: tuple[tuple[str, str], ...] = ()


class Event(NamedTuple):
    """An event that the script logged, an exception, or a checkpoint."""

    time_ns: int
    step: int | None
    rank: str
    name: str
    severity: str
    body: str
    attributes: Mapping[str, Any]
