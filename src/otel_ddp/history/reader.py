"""Reads one history: a SQLite file of a run that goes on, is over, or ran elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from otel_ddp import errors, files, plain
from otel_ddp.history import buckets, tables
from otel_ddp.history.buckets import FAR, FIRST, Bucket, Form, Row
from otel_ddp.history.newest_attempt import is_silent, newest_attempt, of_node, rank_order
from otel_ddp.history.tables import Event, SeriesKey
from otel_ddp.vocabulary.words import ENDED_STATES

# How long to wait while the writer locks the file: longer than any write takes. On a file system
# that does not support locks, SQLite always reports a locked file.
_BUSY_S = 0.5

log = logging.getLogger("otel_ddp.history")


class Unreadable(errors.OtelDdpError):
    """The file is no history, or damaged, or of another version. The message has the reason."""


# Kinds of verdicts whose `step` is the step at which the trouble began, by the program's own count.
# In other verdicts it is the step at which the trouble was detected, by our count.
_AT_A_STEP = ("nonfinite", "death", "stall")
# Errors that reading a damaged or foreign file may raise. SQLite does not enforce the types of
# columns, so any code that uses its values may fail.
DAMAGE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Series(NamedTuple):
    """One series of a history, and the width of its buckets in steps."""

    id: int
    key: SeriesKey
    width: int

    @property
    def form(self) -> Form:
        return buckets.form_of(self.key.kind)


class History:
    """The history of one run on one node. Opened for a request; not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_kind()
        address = f"file:{quote(str(path.absolute()))}?mode=ro"
        with self._readable():
            self._db = sqlite3.connect(address, uri=True, timeout=_BUSY_S)
        try:
            self._rows("PRAGMA trusted_schema = OFF")
            version = self._rows("PRAGMA user_version")[0][0]
            if version != tables.VERSION:
                read = f"this otel-ddp reads version {tables.VERSION}"
                raise Unreadable(f"{path} is of another version ({version}): {read}")
            with self._readable():
                if not tables.is_as_we_made_it(self._db):
                    raise Unreadable(f"{path} is no history of a run: it has other tables")
        except Unreadable:
            self._db.close()
            raise

    def _check_kind(self) -> None:
        """Refuse other files: SQLite opens anything, and would block on a fifo."""
        try:
            is_ours = tables.is_history(self.path)
        except OSError as error:
            raise Unreadable(f"{self.path} cannot be opened: {error.strerror}") from error
        if not is_ours:
            raise Unreadable(f"{self.path} is no history of a run")

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self.close()
        if isinstance(error, DAMAGE):
            raise damaged([self], error) from error

    def close(self) -> None:
        self._db.close()

    def _rows(self, query: str, arguments: Sequence[Any] = ()) -> list[Any]:
        with self._readable():
            return self._db.execute(query, arguments).fetchall()

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Convert errors of SQLite to Unreadable."""
        try:
            yield
        # UnicodeError: SQLite's message may quote content that is not valid UTF-8.
        except (sqlite3.Error, UnicodeError) as error:
            raise Unreadable(f"{self.path} cannot be read: {error}") from error

    # -- the run

    @cached_property
    def about(self) -> dict[str, Any]:
        """The properties of the run. docs/history.md lists the keys."""
        return {key: _loaded(value) for key, value in self._rows("SELECT key, value FROM about")}

    @cached_property
    def ranks(self) -> dict[str, dict[str, Any]]:
        """The processes by rank, as in `otel-ddp status --json`."""
        rows = self._rows("SELECT rank, about FROM ranks")
        found = {str(rank): _loaded(about) for rank, about in rows}
        found = {rank: each for rank, each in found.items() if isinstance(each, dict)}
        return {rank: found[rank] for rank in sorted(found, key=rank_order)}

    @cached_property
    def shift(self) -> int:
        """The program's step number minus ours, which begins at 1. For the first attempt.

        0 if the program logs no step numbers, or counts something else, such as micro-batches.
        """
        return self._shift_at(0)

    def _shift_at(self, time_ns: int) -> int:
        """The `shift` of the attempt at this time.

        Each attempt has its own, since our step numbers begin at 1 again.
        """
        attempts = plain.list_of(dict, self.about.get("attempts"))
        begun = [each for each in attempts if (plain.whole(each.get("began_ns")) or 0) <= time_ns]
        last = (begun or attempts[:1] or [{}])[-1]
        return plain.whole(last.get("shift")) or 0 if last.get("is_even", True) else 0

    @property
    def state(self) -> str:
        """The state of the newest attempt."""
        return newest_attempt([of_node(self.about, self.ranks)]).state

    # -- values

    def series(self, kind: str = "", name: str = "") -> list[Series]:
        """The series with this kind and name, sorted by rank; an empty argument matches all."""
        wanted = {column: word for column, word in (("kind", kind), ("name", name)) if word}
        where = " AND ".join(f"{column} = ?" for column in wanted) or "true"
        rows = self._rows(
            f"SELECT id, kind, name, rank, labels, width FROM series WHERE {where} ORDER BY id",
            (*wanted.values(),),
        )
        return sorted(map(_series, rows), key=lambda each: rank_order(each.key.rank))

    def names(self, kind: str) -> list[str]:
        """The names of all series of a kind, in the order of their first values."""
        rows = self._rows(
            "SELECT name FROM series WHERE kind = ? GROUP BY name ORDER BY min(id)", (kind,)
        )
        return [name for (name,) in rows]

    def columns(
        self, series: Series, first: int = -FAR, until: int = FAR, only: Sequence[int] = ()
    ) -> list[list[Any]]:
        """The buckets of a series with steps from *first* to *until*, as the columns of its `Form`.

        *only*: the indices of the wanted columns, of which the first must be FIRST; all if empty.
        """
        with self._readable():
            key = series.id, series.width
            found = series.form.load(self._db, key, first, until, only)
        begin = bisect_left(found[FIRST], first - first % series.width)
        end = bisect_left(found[FIRST], until - until % series.width + series.width)
        if (begin, end) == (0, len(found[FIRST])):
            return found
        return [column[begin:end] for column in found]

    def sums(
        self,
        series: Series,
        first: int = -FAR,
        until: int = FAR,
        most: int = FAR,
        before: int = FAR,
    ) -> list[Bucket]:
        """The buckets with steps from *first* to *until*, merged so that at most *most* are left.

        *before*: use only buckets that end before this step.
        """
        found = self.columns(series, first, until)
        end = bisect_left(found[buckets.UNTIL], before)
        found = [column[:end] for column in found]
        many = math.ceil(len(found[FIRST]) / most)
        return [*map(Bucket.of, buckets.VALUES.in_pieces(found, many))]

    def newest(self, series: Series) -> Bucket | None:
        """The last bucket of a series; reads one block."""
        rows = self._block(series, "ORDER BY start DESC")
        return Bucket.of(rows[-1]) if rows else None

    def _block(self, series: Series, which: str, *arguments: Any) -> list[Row]:
        """The buckets of the first block that the SQL clause *which* selects."""
        query = f"SELECT count, content FROM blocks WHERE series = ? {which} LIMIT 1"
        found = self._rows(query, (series.id, *arguments))
        return [row for block in found for row in zip(*series.form.unpack(*block), strict=True)]

    def step_range(self, series: Series) -> tuple[int, int] | None:
        """The first and the last step of a series."""
        first, last = (self._block(series, f"ORDER BY start {way}") for way in ("ASC", "DESC"))
        return (first[0][FIRST], last[-1][buckets.UNTIL]) if first else None

    @cached_property
    def step_series(self) -> dict[str, Series]:
        """The series of each rank's steps: as the device timed them, else as the host did."""
        found = self.series("steps")
        by_device = {each.key.rank: each for each in found if each.key.name == "device"}
        return {each.key.rank: by_device.get(each.key.rank, each) for each in found}

    # -- events and verdicts

    def events(self, most: int = 1000, like: str = "") -> list[Event]:
        """The events that contain *like*, latest first."""
        rows = self._rows(
            "SELECT time_ns, step, rank, name, severity, body, attributes FROM events "
            "WHERE instr(lower(body || ' ' || name), ?) ORDER BY time_ns DESC LIMIT ?",
            (like.lower(), most),
        )
        return [Event._make((*row[:-1], _loaded(row[-1]))) for row in rows]

    def verdicts(self) -> list[dict[str, Any]]:
        """The verdicts sorted by their start. A verdict that is over has `until_ns`.

        A verdict that was still open when its run ended, or when the agent was killed, ends at that
        time. The trouble was detected at `step`, and lasted from `since_step` to `until_step`.
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
        """The step at a time, of this rank or else of the first rank; None without steps."""
        found = self.step_series
        series = found.get(rank) or next(iter(found.values()), None)
        if series is None:
            return None
        began = self._block(series, "AND first_ns < ? ORDER BY start DESC", time_ns)
        began = [row for row in began if row[buckets.FIRST_NS] < time_ns]
        rows = began[-1:] or self._block(series, "ORDER BY start")
        if not rows:
            return None
        first, until, first_ns, last_ns = map(int, rows[0][: buckets.LAST_NS + 1])
        # The time of each step in a bucket is unknown, so interpolate.
        share = (time_ns - first_ns) / max(last_ns - first_ns, 1)
        step = min(first + max(math.ceil(share * (until - first + 1)) - 1, 0), until)
        return step + self.shift

    def _end_ns(self) -> int:
        """When the run ended; if it is silent, when its history was last written; else 0."""
        seen_ns = plain.whole(self.about.get("seen_ns")) or 0
        return seen_ns if self.state in ENDED_STATES or is_silent(self.state, seen_ns) else 0


def _series(row: tuple[Any, ...]) -> Series:
    id, kind, name, rank, labels, width = row
    return Series(id, SeriesKey(kind, name, rank, tuple(map(tuple, _loaded(labels) or ()))), width)


def damaged(histories: Sequence[History], error: BaseException) -> Unreadable:
    """The error for the user, to raise instead of an error of DAMAGE."""
    paths = ", ".join(str(each.path) for each in histories)
    log.debug("reading %s", paths, exc_info=error)
    return Unreadable(f"{paths} cannot be read ({error!r}): it is damaged, or otel_ddp has a fault")


def _loaded(text: str) -> Any:
    try:
        return files.parse_json(text)
    except ValueError:
        return None
