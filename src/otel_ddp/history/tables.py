"""The tables of a history, and what is summed up for them: one SQLite file of a run on a node.

Nothing is kept of single steps or values for ever: neighbours are summed up into buckets, each with
its lowest, its highest and its last value. A series that outgrows its share gets buckets twice as
wide, so a file stays small however long its run is. docs/history.md describes the tables.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from otel_ddp import files
from otel_ddp.vocabulary.words import MEASURED_PHASES, PHASE_CODE, PHASES

VERSION: Final = 2
"""SQLite's user_version. A reader refuses a later one."""
# SQLite's application_id: "oddp".
APPLICATION: Final = 0x6F646470
SUFFIX: Final = ".sqlite"
# SQLite's files beside a database that is open.
_BESIDE = ("-wal", "-shm", "-journal")
# What a database begins with, and where it has the id of its application.
_MAGIC, _APPLICATION_AT = b"SQLite format 3\0", 68


class Bucket(NamedTuple):
    """Neighbouring values of one series."""

    start: int
    first: int
    """The first step in it; of series without steps the number of the value; of `node` seconds."""
    until: int
    """The last one."""
    first_ns: int
    last_ns: int
    finite: int
    """How many of its values are finite; the total, the lowest and the highest are of these."""
    total: float
    low: float | None
    high: float | None
    last: float | None
    """None where it is NaN."""
    nonfinite: int
    epoch: float | None


class StepBucket(NamedTuple):
    """Neighbouring steps of one rank, or of several."""

    ranks: int
    """Of how many."""
    first: int
    until: int
    first_ns: int
    last_ns: int
    steps: int
    took_ns: int
    """Of all of them together; so are the phases."""
    low_ns: int
    high_ns: int
    unusual: int
    """How many of them compiled, saved, evaluated or were skipped."""
    work: int
    """Tokens, or samples where tokens are not known."""
    phases_ns: dict[str, int]
    """By the catalogue's words. `comm_wait` is waiting for other ranks; the rest is own work."""


# How columns of several are one; of all others it is their sum.
_WAYS: Final[Mapping[str, Callable[[Iterable[int]], int]]] = {
    **dict.fromkeys(("first", "first_ns", "low_ns"), min),
    **dict.fromkeys(("until", "last_ns", "high_ns"), max),
}


def way_of(column: str) -> Callable[[Iterable[int]], int]:
    """How a column of several buckets of steps is one."""
    return _WAYS.get(column, sum)


def together(parts: Sequence[StepBucket]) -> StepBucket:
    """The steps of these ranks as one."""
    columns = zip(*(each[:-1] for each in parts), strict=True)
    sums = [way_of(name)(each) for name, each in zip(StepBucket._fields, columns, strict=False)]
    phases = {word: sum(each.phases_ns[word] for each in parts) for word in MEASURED_PHASES}
    return StepBucket._make([*sums, phases])


# In the order of the columns: a table has these after the series and the start.
PHASE_COLUMNS: Final = tuple(f"{word}_ns" for word in MEASURED_PHASES)
SUM_COLUMNS: Final = Bucket._fields[1:]
_OF_STEPS: Final = StepBucket._fields[1:-1]
STEP_COLUMNS: Final = (*_OF_STEPS, *PHASE_COLUMNS)

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


_of_value = attrgetter(*SUM_COLUMNS)
_of_step = attrgetter(*_OF_STEPS)


class ValueSum:
    """Of the values of one series."""

    __slots__ = SUM_COLUMNS

    def __init__(self, position: int, time_ns: int) -> None:
        self.first = self.until = position
        self.first_ns = self.last_ns = time_ns
        self.finite = self.nonfinite = 0
        self.total = 0.0
        self.low: float | None = None
        self.high: float | None = None
        self.last: float | None = None
        self.epoch: float | None = None

    def add(self, position: int, time_ns: int, value: float, epoch: float | None) -> None:
        """One more value. *position*: the step, or whatever the series is counted by."""
        if position < self.first:
            self.first = position
        if position > self.until:
            self.until = position
        if time_ns < self.first_ns:
            self.first_ns = time_ns
        if math.isfinite(value):
            self.finite += 1
            self.total += value
            if self.low is None or value < self.low:
                self.low = value
            if self.high is None or value > self.high:
                self.high = value
        else:
            self.nonfinite += 1
        if time_ns >= self.last_ns:
            self.last_ns = time_ns
            # SQLite has no NaN: it keeps NULL.
            self.last = value
            self.epoch = epoch if epoch is not None else self.epoch

    def row(self) -> tuple[Any, ...]:
        """In the order of the columns."""
        return tuple(_of_value(self))


# Of each code of the journal; a phase of a later version is told as "other".
_PHASE_OF = bytes(
    phase if (phase := code & PHASE_CODE) < len(MEASURED_PHASES) else PHASES["other"]
    for code in range(256)
)


class StepSum:
    """Of the steps of one rank, by one clock."""

    __slots__ = (*_OF_STEPS, "phases_ns")

    def __init__(self, position: int, began_ns: int) -> None:
        self.first = self.until = position
        self.first_ns, self.last_ns = began_ns, 0
        self.steps = self.took_ns = self.high_ns = self.unusual = self.work = 0
        self.low_ns = 1 << 62
        self.phases_ns = [0] * len(MEASURED_PHASES)

    def add(
        self,
        position: int,
        began_ns: int,
        ended_ns: int,
        codes: bytes,
        spans_ns: Sequence[int],
        work: int,
        unusual: bool,
    ) -> None:
        """One more step. *codes*: of the journal, of the phases that took *spans_ns*."""
        # This runs for every step of every rank: a comparison takes a third of `min`.
        if position < self.first:
            self.first = position
        if position > self.until:
            self.until = position
        if began_ns < self.first_ns:
            self.first_ns = began_ns
        if ended_ns > self.last_ns:
            self.last_ns = ended_ns
        took_ns = ended_ns - began_ns
        self.steps += 1
        self.took_ns += took_ns
        if took_ns < self.low_ns:
            self.low_ns = took_ns
        if took_ns > self.high_ns:
            self.high_ns = took_ns
        self.work += work
        self.unusual += unusual
        phases_ns = self.phases_ns
        for phase, span_ns in zip(codes.translate(_PHASE_OF), spans_ns, strict=True):
            phases_ns[phase] += span_ns

    def row(self) -> tuple[Any, ...]:
        """In the order of the columns."""
        return (*_of_step(self), *self.phases_ns)
