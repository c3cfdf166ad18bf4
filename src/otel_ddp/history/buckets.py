"""Buckets of neighbouring values or steps: how a history sums them up, and packs them into blocks.

A bucket is a tuple: four columns that all have, then those of its form. A block is BLOCK buckets of
one series, side by side on the axis of steps, one row of the file: a write costs a row or two for
each series, not one for each value.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

from otel_ddp.vocabulary.words import MEASURED_PHASES, PHASE_CODE, PHASES

BLOCK: Final = 64
"""So many buckets are in one row of the file at most."""
FAR: Final = (1 << 63) - 1
"""No step of a series is further."""
# In the head of a block: all buckets have the same number, which is stored once.
_ALIKE = 0x8000

Row = tuple[Any, ...]
Columns = Sequence[Sequence[Any]]
FIRST, UNTIL, FIRST_NS, LAST_NS = range(4)
"""The columns that all have: steps, and times."""
FINITE: Final = 4
"""A column of values."""


_LATEST = itemgetter(-1)
_Column = tuple[str, Callable[[Sequence[Any]], Any]]
_SHARED: Mapping[str, _Column] = {
    "first": ("q", min),
    "until": ("q", max),
    "first_ns": ("q", min),
    "last_ns": ("q", max),
}


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where the same number follows itself."""
    if len({*numbers}) == len(numbers):
        return [*pairwise(range(len(numbers) + 1))]
    begins = [at for at, (one, other) in enumerate(pairwise(numbers), 1) if one != other]
    return [*pairwise([0, *begins, len(numbers)])] if numbers else []


def _pack(columns: Sequence[bytes]) -> bytes:
    """A block: where each column is, in words, and then the columns, as 64-bit numbers.

    Equal columns are stored once, and so is the number of a column that has a single one.
    """
    places: dict[bytes, int] = {}
    heads, words = array("H"), bytearray()
    for packed in columns:
        alike = packed == packed[:8] * (len(packed) // 8)
        packed = packed[:8] if alike else packed
        if packed not in places:
            places[packed] = len(words) // 8 | (_ALIKE if alike else 0)
            words += packed
        heads.append(places[packed])
    return heads.tobytes() + words


class Form:
    """The columns of a series' buckets, and how buckets are merged."""

    def __init__(self, columns: Mapping[str, _Column]) -> None:
        """*columns*: of each, its code for `array`, and what makes one number of several."""
        self.names = (*_SHARED, *columns)
        self._columns = (*_SHARED.values(), *columns.values())

    def together(self, rows: Sequence[Row]) -> Row:
        """Several buckets as one; the latest comes last."""
        columns = zip(*rows, strict=True)
        return tuple(rule(each) for (_, rule), each in zip(self._columns, columns, strict=True))

    def sum_up(self, columns: Columns, wide: int) -> dict[int, Row]:
        """Buckets of a series as fewer that are *wide*; by their numbers."""
        numbers = [first // wide for first in columns[FIRST]]
        runs = _runs(numbers)
        rows = zip(*self._sums(columns, runs), strict=True)
        return dict(zip([numbers[begin] for begin, _ in runs], rows, strict=True))

    def in_pieces(self, columns: Columns, many: int) -> Iterable[Row]:
        """Buckets, *many* neighbours as one."""
        runs = _runs([at // many for at in range(len(columns[FIRST]))])
        return zip(*self._sums(columns, runs), strict=True)

    def merged(self, rows: list[Row], width: int) -> Columns:
        """These buckets in the order of steps, one for each *width* steps."""
        # Several values of one step are ordered by time: the latest comes last.
        rows.sort(key=itemgetter(FIRST, LAST_NS))
        columns = [*zip(*rows, strict=True)]
        return self._sums(columns, _runs([first // width for first in columns[FIRST]]))

    def _sums(self, columns: Columns, runs: Sequence[tuple[int, int]]) -> Columns:
        # Mostly each value is a bucket of its own.
        if len(runs) == len(columns[FIRST]):
            return columns
        return [
            [rule(column[begin:end]) for begin, end in runs]
            for (_, rule), column in zip(self._columns, columns, strict=True)
        ]

    def blocks(self, columns: Columns, width: int) -> Iterable[tuple[int, int, int, bytes]]:
        """Buckets in the order of steps as rows of the file: start, count, first time, content.

        Raises OverflowError.
        """
        span = width * BLOCK
        numbers = [first // span for first in columns[FIRST]]
        packed: list[tuple[str, Sequence[Any], bytes]] = []
        for (code, _), column in zip(self._columns, columns, strict=True):
            # Of single values the lowest, the highest, the last and the sum are the same.
            same = (each[2] for each in packed if each[0] == code and each[1] == column)
            content = next(same, None) or array(code, column).tobytes()
            packed.append((code, column, content))
        contents = [content for *_, content in packed]
        end = 0
        while end < len(numbers):
            begin, end = end, bisect_right(numbers, numbers[end])
            first_ns = min(columns[FIRST_NS][begin:end])
            block = _pack([each[8 * begin : 8 * end] for each in contents])
            yield numbers[begin] * span, end - begin, first_ns, block

    def unpack(self, count: int, content: bytes, only: Iterable[int] = ()) -> list[list[Any]]:
        """The columns of a block, or *only* some; raises an error of `reader.DAMAGE`."""
        head = memoryview(content)[: 2 * len(self._columns)].cast("H")
        words = memoryview(content)[head.nbytes :]
        views: dict[str, memoryview[Any]] = {"q": words.cast("q"), "d": words.cast("d")}
        # Whoever made the file may have written anything.
        if not 0 < count <= BLOCK:
            raise ValueError(f"a block of {count} buckets")
        found = []
        for column in only or range(len(self._columns)):
            place, (code, _) = head[column], self._columns[column]
            at = place & ~_ALIKE
            if place & _ALIKE:
                found.append([views[code][at]] * count)
            else:
                found.append(views[code][at : at + count].tolist())
            if len(found[-1]) < count:
                raise ValueError(f"a block of {count} buckets in {len(content)} bytes")
        return found

    def load(
        self,
        database: sqlite3.Connection,
        series: tuple[int, int],
        first: int,
        until: int,
        only: Sequence[int] = (),
    ) -> list[list[Any]]:
        """The columns of a series, of its blocks from *first* to *until*; raises sqlite3.Error.

        *series*: its id, and how wide its buckets are. *only*: some columns.
        """
        id, width = series
        found: list[list[Any]] = [[] for _ in only or self.names]
        for count, content in database.execute(
            "SELECT count, content FROM blocks WHERE series = ? AND start BETWEEN ? AND ? "
            "ORDER BY start",
            (id, first - first % (width * BLOCK), until),
        ):
            for column, more in zip(found, self.unpack(count, content, only), strict=True):
                column += more
        return found


VALUES: Final = Form(
    {
        "finite": ("q", sum),
        "total": ("d", sum),
        "low": ("d", min),
        "high": ("d", max),
        "last": ("d", _LATEST),
        "nonfinite": ("q", sum),
        "epoch": ("d", _LATEST),
    }
)
STEPS: Final = Form(
    {
        "steps": ("q", sum),
        "took_ns": ("q", sum),
        "low_ns": ("q", min),
        "high_ns": ("q", max),
        "unusual": ("q", sum),
        "work": ("q", sum),
        **{f"{word}_ns": ("q", sum) for word in MEASURED_PHASES},
    }
)


def form_of(kind: str) -> Form:
    """That of a kind of series."""
    return STEPS if kind == "steps" else VALUES


def value_row(position: int, time_ns: int, value: float, epoch: float | None) -> Row:
    """The bucket of one value. *position*: the step, or whatever the series is counted by."""
    epoch = math.nan if epoch is None else epoch
    if math.isfinite(value):
        return (position, position, time_ns, time_ns, 1, value, value, value, value, 0, epoch)
    # The lowest and the highest of none.
    extremes = math.inf, -math.inf
    return (position, position, time_ns, time_ns, 0, 0.0, *extremes, value, 1, epoch)


# By a code of the journal: the column of its phase. One without a column counts as "other".
_COLUMN = {PHASES[word]: at for at, word in enumerate(MEASURED_PHASES)}
_COLUMN_OF = bytes(_COLUMN.get(code & PHASE_CODE, _COLUMN[PHASES["other"]]) for code in range(256))


def step_row(
    position: int,
    began_ns: int,
    ended_ns: int,
    codes: bytes,
    spans_ns: Sequence[int],
    work: int,
    unusual: bool,
) -> Row:
    """The bucket of one step. *codes*: of the journal, of the phases that took *spans_ns*."""
    phases_ns = [0] * len(MEASURED_PHASES)
    for column, span_ns in zip(codes.translate(_COLUMN_OF), spans_ns, strict=True):
        phases_ns[column] += span_ns
    took_ns = ended_ns - began_ns
    times = position, position, began_ns, ended_ns
    return (*times, 1, took_ns, took_ns, took_ns, int(unusual), work, *phases_ns)


class Bucket(NamedTuple):
    """Neighbouring values of one series."""

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

    @classmethod
    def of(cls, row: Row) -> Bucket:
        """The bucket of a row, with None for unknown numbers."""
        *shared, low, high, last, nonfinite, epoch = row
        if not row[FINITE]:
            low = high = None
        last, epoch = (None if math.isnan(each) else each for each in (last, epoch))
        return cls._make((*shared, low, high, last, nonfinite, epoch))


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

    @classmethod
    def of(cls, row: Row, ranks: int = 1) -> StepBucket:
        """The bucket of a row."""
        shared = len(row) - len(MEASURED_PHASES)
        phases_ns = dict(zip(MEASURED_PHASES, row[shared:], strict=True))
        return cls._make((ranks, *row[:shared], phases_ns))
