"""The tables of a history: one SQLite file for one run on one node.

Nothing is kept of single steps or values for ever: neighbours are summed up into buckets, each with
its lowest, its highest and its last value. A series that outgrows its share gets buckets twice as
wide, so a file stays small however long its run is. docs/history.md describes the tables.
"""

from __future__ import annotations

from typing import Final

from otel_ddp.words import PHASES

VERSION: Final = 1
"""SQLite's user_version. A reader refuses a later one."""
# SQLite's application_id: "oddp".
APPLICATION: Final = 0x6F646470
SUFFIX: Final = ".sqlite"

# In the order of the columns.
PHASE_COLUMNS: Final = tuple(f"{word}_ns" for word in PHASES)
SUM_COLUMNS: Final = (
    *("first", "until", "first_ns", "last_ns", "finite", "total"),
    *("low", "high", "last", "nonfinite", "epoch"),
)
STEP_COLUMNS: Final = (
    *("first", "until", "first_ns", "last_ns", "steps", "took_ns", "low_ns", "high_ns"),
    *("unusual", "work", *PHASE_COLUMNS),
)

_PHASES = ", ".join(f"{column} INTEGER NOT NULL" for column in PHASE_COLUMNS)
TABLES: Final = f"""
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
CREATE TABLE sums (
  series INTEGER NOT NULL, start INTEGER NOT NULL, first INTEGER NOT NULL, until INTEGER NOT NULL,
  first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, finite INTEGER NOT NULL, total REAL NOT NULL,
  low REAL, high REAL, last REAL, nonfinite INTEGER NOT NULL, epoch REAL,
  PRIMARY KEY (series, start)
) WITHOUT ROWID;
CREATE TABLE steps (
  series INTEGER NOT NULL, start INTEGER NOT NULL, first INTEGER NOT NULL, until INTEGER NOT NULL,
  first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, steps INTEGER NOT NULL,
  took_ns INTEGER NOT NULL, low_ns INTEGER NOT NULL, high_ns INTEGER NOT NULL,
  unusual INTEGER NOT NULL, work INTEGER NOT NULL, {_PHASES},
  PRIMARY KEY (series, start)
) WITHOUT ROWID;
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
