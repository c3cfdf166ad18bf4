"""The tables of a history: one SQLite file of a run on a node.

Nothing is kept of single steps or values for ever: neighbours are summed up into buckets, each with
its lowest, its highest and its last value. A series that outgrows its share gets buckets twice as
wide, so a file stays small however long its run is. docs/history.md describes the tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from otel_ddp import files

VERSION: Final = 2
"""SQLite's user_version. A reader refuses any other."""
# SQLite's application_id: "oddp".
APPLICATION: Final = 0x6F646470
SUFFIX: Final = ".sqlite"
# SQLite's files beside a database that is open.
_BESIDE = ("-wal", "-shm", "-journal")
# What a database begins with, and where it has the id of its application.
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
    """Whether a file is marked as one of ours. SQLite is not asked: it leaves files beside others.

    Raises OSError; a link is not followed, nor a fifo waited for.
    """
    head = files.read(path, _APPLICATION_AT + 4)
    return head.startswith(_MAGIC) and head[_APPLICATION_AT:] == APPLICATION.to_bytes(4, "big")


def beside(path: Path) -> Iterator[Path]:
    """The names that SQLite opens with a database of this name, whatever they lead to."""
    return (path.with_name(path.name + suffix) for suffix in _BESIDE)


def is_as_we_made_it(database: sqlite3.Connection) -> bool:
    """Whether it has our tables and nothing else: what stands in a table's place may run for ever.

    Raises sqlite3.Error.
    """
    return _schema(database) == _own_schema()


def _schema(database: sqlite3.Connection) -> list[tuple[Any, ...]]:
    # One more than we have is enough to see that it is not ours.
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


RunKey = tuple[str, str]
"""Group and name of a run."""


class SeriesKey(NamedTuple):
    """What a series is."""

    kind: str
    """`value`: logged; `steps`: of a rank, `name` is the clock; `node`: a gauge of the node, of a
    device or of a process; `counter`: the same of what only grows."""
    name: str
    rank: str = ""
    labels: tuple[tuple[str, str], ...] = ()


class Event(NamedTuple):
    """An event of the script, an exception, a checkpoint."""

    time_ns: int
    step: int | None
    rank: str
    name: str
    severity: str
    body: str
    attributes: Mapping[str, Any]
