"""Reads histories: of a run that goes on, of one that has ended, of a folder from elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from otel_ddp import errors, files, plain
from otel_ddp.history import tables
from otel_ddp.history.newest_attempt import is_silent, newest_attempt, of_node, rank_order
from otel_ddp.history.tables import (
    STEP_COLUMNS,
    SUM_COLUMNS,
    Bucket,
    Event,
    SeriesKey,
    StepBucket,
)
from otel_ddp.vocabulary.words import ENDED_STATES, MEASURED_PHASES

# No write takes this long. A file system without locks answers as if another process had one.
_BUSY_S = 0.5

# What many buckets of steps are together.
_TOGETHER = ", ".join(f"{tables.way_of(each).__name__}({each})" for each in STEP_COLUMNS)

log = logging.getLogger("otel_ddp.history")


class Unreadable(errors.OtelDdpError):
    """The file is no history, or damaged, or of a later version; the text says which."""


# The step of these is the one at which they began, by the program's number.
_AT_A_STEP = ("nonfinite", "death", "stall")
# What code meets that reads what no agent has written. A file may come from elsewhere, and SQLite
# takes a text where a number is declared.
DAMAGE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Series(NamedTuple):
    """One series of a history, and how wide its buckets are."""

    id: int
    key: SeriesKey
    width: int


class History:
    """One file, of one run on one node. Opened for one question or a few; not for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_kind()
        self._db = self._open("mode=ro")
        try:
            self._rows("SELECT count(*) FROM sqlite_master")
        except Unreadable:
            # In a folder where nothing can be written, SQLite cannot tell others that it reads.
            self._db.close()
            self._db = self._open("immutable=1")
        try:
            version = self._rows("PRAGMA user_version")[0][0]
            if version > tables.VERSION:
                later = f"is of a later version ({version}): a newer otel-ddp can read it"
                raise Unreadable(f"{path} {later}")
            with self._told():
                if not tables.is_as_we_made_it(self._db):
                    raise Unreadable(f"{path} is no history of a run: it has other tables")
        except Unreadable:
            self._db.close()
            raise

    def _check_kind(self) -> None:
        """SQLite opens what has a name, and would wait for a fifo."""
        try:
            is_ours = tables.is_history(self.path)
            for each in tables.beside(self.path):
                if os.path.lexists(each) and not stat.S_ISREG(os.lstat(each).st_mode):
                    raise Unreadable(f"{self.path} is not read: {each.name} beside it is no file")
        except OSError as error:
            raise Unreadable(f"{self.path} cannot be opened: {error.strerror}") from error
        if not is_ours:
            raise Unreadable(f"{self.path} is no history of a run")

    def _open(self, how: str) -> sqlite3.Connection:
        # Never makes or changes a file.
        try:
            address = f"file:{quote(str(self.path.absolute()))}?{how}"
            database = sqlite3.connect(address, uri=True, timeout=_BUSY_S)
            database.execute("PRAGMA trusted_schema = OFF")
        except sqlite3.Error as error:
            raise Unreadable(f"{self.path} cannot be opened: {error}") from error
        return database

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self.close()
        if isinstance(error, DAMAGE):
            raise damaged([self], error) from error

    def close(self) -> None:
        self._db.close()

    def _rows(self, query: str, arguments: Sequence[Any] = ()) -> list[Any]:
        with self._told():
            return self._db.execute(query, arguments).fetchall()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raises Unreadable for an error of SQLite."""
        try:
            yield
        # SQLite quotes what it found, which may be no text.
        except (sqlite3.Error, UnicodeError) as error:
            raise Unreadable(f"{self.path} cannot be read: {error}") from error

    # -- the run

    @cached_property
    def about(self) -> dict[str, Any]:
        """What is known of the run; docs/history.md lists the keys."""
        return {key: _loaded(value) for key, value in self._rows("SELECT key, value FROM about")}

    @cached_property
    def ranks(self) -> dict[str, dict[str, Any]]:
        """Each process by its rank, as `otel-ddp status --json` describes it."""
        rows = self._rows("SELECT rank, about FROM ranks")
        found = {str(rank): _loaded(about) for rank, about in rows}
        found = {rank: each for rank, each in found.items() if isinstance(each, dict)}
        return {rank: found[rank] for rank in sorted(found, key=rank_order)}

    @cached_property
    def shift(self) -> int:
        """The program's number of a step less ours: we count from 1, as its first attempt began.

        0 of a program that counts nothing, or parts of steps.
        """
        return self._shift_at(0)

    def _shift_at(self, time_ns: int) -> int:
        """The same of the attempt of this time: each counts from 1."""
        attempts = plain.list_of(dict, self.about.get("attempts"))
        begun = [each for each in attempts if (plain.whole(each.get("began_ns")) or 0) <= time_ns]
        last = (begun or attempts[:1] or [{}])[-1]
        return plain.whole(last.get("shift")) or 0 if last.get("is_even", True) else 0

    @property
    def state(self) -> str:
        """That of the newest attempt."""
        return newest_attempt([of_node(self.about, self.ranks)]).state

    # -- values

    def series(self, kind: str = "", name: str = "") -> list[Series]:
        """Those of a kind and of a name, in the order of their ranks; others are left unread."""
        wanted = {column: word for column, word in (("kind", kind), ("name", name)) if word}
        where = " AND ".join(f"{column} = ?" for column in wanted) or "true"
        rows = self._rows(
            f"SELECT id, kind, name, rank, labels, width FROM series WHERE {where} ORDER BY id",
            (*wanted.values(),),
        )
        return sorted(map(_series, rows), key=lambda each: rank_order(each.key.rank))

    def names(self, kind: str) -> list[str]:
        """The names of a kind, in the order in which they were first written."""
        rows = self._rows(
            "SELECT name FROM series WHERE kind = ? GROUP BY name ORDER BY min(id)", (kind,)
        )
        return [name for (name,) in rows]

    def sums(self, series: Series, first: int = -(2**62), until: int = 2**62) -> list[Bucket]:
        """The buckets of a series from *first* to *until*."""
        rows = self._rows(
            f"SELECT start, {', '.join(SUM_COLUMNS)} FROM sums WHERE series = ? "
            "AND start > ? - ? AND start <= ? ORDER BY start",
            (series.id, first, series.width, until),
        )
        return [Bucket(*row) for row in rows]

    def sums_of_all(
        self, series: Sequence[Series], most: int, first: int = -(2**62), until: int = 2**62
    ) -> list[Bucket]:
        """The values of many series together, in about *most* buckets; `last` is their mean.

        SQLite adds them up, as for `steps`.
        """
        where, kept = _among(series, first, until), math.lcm(*(each.width for each in series))
        [(low, high)] = self._rows(f"SELECT min(start), max(start) FROM sums WHERE {where}")
        if low is None:
            return []
        wide = kept * max(math.ceil((high - low + 1) / most / kept), 1)
        rows = self._rows(
            f"SELECT (start - start % {wide}) AS cell, min(first), max(until), min(first_ns), "
            "max(last_ns), sum(finite), sum(total), min(low), max(high), "
            "sum(total) / nullif(sum(finite), 0), sum(nonfinite), max(epoch) "
            f"FROM sums WHERE {where} GROUP BY cell ORDER BY cell"
        )
        return [Bucket(*row) for row in rows]

    def newest(self, series: Series) -> Bucket | None:
        """The last bucket of a series. It reads no other: thousands may be asked for theirs."""
        rows = self._rows(
            f"SELECT start, {', '.join(SUM_COLUMNS)} FROM sums WHERE series = ? "
            "ORDER BY start DESC LIMIT 1",
            (series.id,),
        )
        return next((Bucket(*row) for row in rows), None)

    def steps(
        self, series: Sequence[Series], wide: int = 1, first: int = -(2**62), until: int = 2**62
    ) -> dict[int, StepBucket]:
        """The steps of all these series, *wide* of them together, by their number.

        SQLite adds them up: a run of 100,000 steps on 8 ranks takes 0.03 s instead of 0.3 s.
        """
        rows = self._rows(
            f"SELECT start / {wide} AS cell, count(DISTINCT series), {_TOGETHER} FROM steps "
            f"WHERE {_among(series, first, until)} GROUP BY cell ORDER BY cell"
        )
        before = len(StepBucket._fields) - 1
        return {
            cell: StepBucket._make(
                (*row[:before], dict(zip(MEASURED_PHASES, row[before:], strict=True)))
            )
            for cell, *row in rows
        }

    def sums_of_each(
        self, series: Sequence[Series], sums: Sequence[str], wide: int, first: int, until: int
    ) -> dict[int, dict[int, tuple[Any, ...]]]:
        """Of each series by its id, the sums of some columns over *wide* steps, by their number.

        One question for thousands of ranks.
        """
        found: dict[int, dict[int, tuple[Any, ...]]] = {}
        for of, cell, *row in self._rows(
            f"SELECT series, start / {wide} AS cell, {', '.join(f'sum({each})' for each in sums)} "
            f"FROM steps WHERE {_among(series, first, until)} GROUP BY series, cell"
        ):
            found.setdefault(of, {})[cell] = tuple(row)
        return found

    def step_range(self, series: Series) -> tuple[int, int] | None:
        """The first and the last step of a series."""
        query = "SELECT start, until FROM steps WHERE series = ? ORDER BY start {} LIMIT 1"
        first, last = (self._rows(query.format(way), (series.id,)) for way in ("ASC", "DESC"))
        return (first[0][0], last[0][1]) if first else None

    @cached_property
    def step_series(self) -> dict[str, Series]:
        """The steps of each rank, by the device's clock where it has counted them."""
        found = self.series("steps")
        by_device = {each.key.rank: each for each in found if each.key.name == "device"}
        return {each.key.rank: by_device.get(each.key.rank, each) for each in found}

    # -- what was said

    def events(self, most: int = 1000, before_ns: int = 2**63 - 1, like: str = "") -> list[Event]:
        """The latest events before a time, the latest first, with *like* in them."""
        rows = self._rows(
            "SELECT time_ns, step, rank, name, severity, body, attributes FROM events "
            "WHERE time_ns < ? AND instr(lower(body || ' ' || name), ?) "
            "ORDER BY time_ns DESC LIMIT ?",
            (before_ns, like.lower(), most),
        )
        return [Event._make((*row[:-1], _loaded(row[-1]))) for row in rows]

    def verdicts(self) -> list[dict[str, Any]]:
        """Every verdict in the order of beginning; one that is over has `until_ns`.

        None outlasts its run, nor an agent that was killed and could not write its end. `step` is
        where it was found, `since_step` where it began, `until_step` what ran when it ended.
        """
        rows = self._rows("SELECT about, since_ns, until_ns FROM verdicts ORDER BY since_ns")
        end_ns = self._end_ns()
        found = []
        for about, since, until in rows:
            verdict = _loaded(about)
            rank = str((verdict.get("who") or {}).get("rank"))
            began = self._step_at(since, rank)
            if verdict["step"] is not None:
                if verdict["kind"] in _AT_A_STEP:
                    began = int(verdict["step"])
                else:
                    verdict["step"] += self._shift_at(since)
            until = max(since, end_ns) if until is None and end_ns else until
            ended = None if until is None else self._step_at(until, rank)
            ends = {"until_ns": until, "since_step": began, "until_step": ended}
            found.append({**verdict, **ends})
        return found

    def _step_at(self, time_ns: int, rank: str) -> int | None:
        """What this rank trained then, or the first one if that is not known; None without steps.

        What a time ends, it is a part of; before the first step it is that one.
        """
        found = self.step_series
        series = found.get(rank) or next(iter(found.values()), None)
        if series is None:
            return None
        query = "SELECT first, until, first_ns, last_ns FROM steps WHERE series = ? {} LIMIT 1"
        rows = self._rows(
            query.format("AND first_ns < ? ORDER BY start DESC"), (series.id, time_ns)
        ) or self._rows(query.format("ORDER BY start"), (series.id,))
        if not rows:
            return None
        first, until, first_ns, last_ns = map(int, rows[0])
        # In a bucket of several steps each has taken the same.
        share = (time_ns - first_ns) / max(last_ns - first_ns, 1)
        step = min(first + max(math.ceil(share * (until - first + 1)) - 1, 0), until)
        return step + self.shift

    def _end_ns(self) -> int:
        """When the run ended here, or was last written of; 0 while it goes on."""
        seen_ns = plain.whole(self.about.get("seen_ns")) or 0
        return seen_ns if self.state in ENDED_STATES or is_silent(self.state, seen_ns) else 0


def _among(series: Sequence[Series], first: int, until: int) -> str:
    """The buckets of these series from *first* to *until*."""
    numbers = ", ".join(str(each.id) for each in series)
    return f"series IN ({numbers}) AND start > {first} - {_widest(series)} AND start <= {until}"


def _widest(series: Sequence[Series]) -> int:
    return max((each.width for each in series), default=1)


def _series(row: tuple[Any, ...]) -> Series:
    id, kind, name, rank, labels, width = row
    return Series(id, SeriesKey(kind, name, rank, tuple(map(tuple, _loaded(labels) or ()))), width)


def damaged(histories: Sequence[History], error: BaseException) -> Unreadable:
    """What is told of an error among DAMAGE."""
    paths = ", ".join(str(each.path) for each in histories)
    log.debug("reading %s", paths, exc_info=error)
    return Unreadable(f"{paths} cannot be read ({error!r}): it is damaged, or otel_ddp has a fault")


def _loaded(text: str) -> Any:
    try:
        return files.parse_json(text)
    except ValueError:
        return None
