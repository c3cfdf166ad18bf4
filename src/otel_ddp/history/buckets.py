"""Buckets of neighbouring values or steps: how a history sums them up, and packs them into blocks.

A bucket is a tuple: four columns that all have, then those of its form. A block is BLOCK buckets of
one series, side by side on the axis of steps, one row of the file: a write costs a row or two for
each series, not one for each value.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
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


def _latest(column: Sequence[float]) -> float:
    return column[-1]


_Column = tuple[str, Callable[[Sequence[Any]], Any]]
_SHARED: Mapping[str, _Column] = {
    "first": ("q", min),
    "until": ("q", max),
    "first_ns": ("q", min),
    "last_ns": ("q", max),
}


class Form:
    """What the buckets of a series consist of, and how several are one."""

    def __init__(self, columns: Mapping[str, _Column]) -> None:
        """*columns*: of each, its code for `array`, and what makes one number of several."""
        self.names = (*_SHARED, *columns)
        self._columns = (*_SHARED.values(), *columns.values())

    def together(self, rows: Iterable[Row]) -> Row:
        """Several buckets as one; the latest comes last."""
        columns = zip(*rows, strict=True)
        return tuple(rule(each) for (_, rule), each in zip(self._columns, columns, strict=True))

    def sum_up(self, columns: Columns, wide: int) -> dict[int, Row]:
        """Buckets, sorted by their first steps, as fewer that are *wide*; by their numbers."""
        numbers = [first // wide for first in columns[FIRST]]
        begins = [at for at, (one, other) in enumerate(pairwise(numbers), 1) if one != other]
        begins = [0, *begins] if numbers else []
        rows = self._sums(columns, begins)
        return dict(zip([numbers[at] for at in begins], rows, strict=True))

    def in_pieces(self, columns: Columns, many: int) -> list[Row]:
        """Buckets, *many* neighbours as one."""
        if many <= 1:
            return [*zip(*columns, strict=True)]
        return self._sums(columns, range(0, len(columns[FIRST]), many))

    def _sums(self, columns: Columns, begins: Sequence[int]) -> list[Row]:
        spans = [*pairwise([*begins, len(columns[FIRST])])]
        summed = [
            [rule(column[begin:end]) for begin, end in spans]
            for (_, rule), column in zip(self._columns, columns, strict=True)
        ]
        return [*zip(*summed, strict=True)]

    def merged(self, rows: list[Row], width: int) -> list[Row]:
        """These buckets in the order of steps, one for each *width* steps."""
        # Each number with its time: the latest of a bucket comes last.
        rows.sort(key=lambda row: (row[FIRST] // width, row[LAST_NS]))
        # Mostly each value is a bucket of its own.
        if len({row[FIRST] // width for row in rows}) == len(rows):
            return rows
        return [*self.sum_up([*zip(*rows, strict=True)], width).values()]

    def pack(self, rows: Sequence[Row]) -> bytes:
        """A block: where each column is, in words, and then the columns, as 64-bit numbers.

        Columns that are alike are stored once: of single values the lowest, the highest, the last
        and the sum are the same. Raises OverflowError.
        """
        places: dict[bytes, int] = {}
        heads, words = array("H"), bytearray()
        for (code, _), column in zip(self._columns, zip(*rows, strict=True), strict=True):
            packed = array(code, column).tobytes()
            alike = packed == packed[:8] * len(rows)
            packed = packed[:8] if alike else packed
            if packed not in places:
                places[packed] = len(words) // 8 | (_ALIKE if alike else 0)
                words += packed
            heads.append(places[packed])
        return heads.tobytes() + words

    def unpack(self, count: int, content: bytes) -> list[Sequence[Any]]:
        """The columns of a block; raises ValueError or TypeError if it is damaged."""
        head = memoryview(content)[: 2 * len(self._columns)].cast("H")
        words = memoryview(content)[head.nbytes :]
        views: dict[str, memoryview[Any]] = {"q": words.cast("q"), "d": words.cast("d")}
        if not 0 < count <= BLOCK or len(head) < len(self._columns):
            raise ValueError(f"a block of {count} buckets in {len(content)} bytes")
        found: list[Sequence[Any]] = []
        for place, (code, _) in zip(head, self._columns, strict=True):
            at = place & ~_ALIKE
            column = views[code][at : at + (1 if place & _ALIKE else count)].tolist()
            found.append(column * count if place & _ALIKE else column)
            if len(found[-1]) < count:
                raise ValueError(f"a block of {count} buckets in {len(content)} bytes")
        return found

    def blocks(self, rows: Sequence[Row], width: int) -> Iterable[tuple[int, int, int, bytes]]:
        """Sorted buckets as rows of the file: start, count, first time, content."""
        span = width * BLOCK
        for number, of_block in groupby(rows, key=lambda row: row[FIRST] // span):
            block = [*of_block]
            first_ns = min(map(itemgetter(FIRST_NS), block))
            yield number * span, len(block), first_ns, self.pack(block)

    def load(
        self, database: sqlite3.Connection, series: int, width: int, first: int, until: int
    ) -> list[list[Any]]:
        """The columns of a series, of its blocks from *first* to *until*; raises sqlite3.Error."""
        found: list[list[Any]] = [[] for _ in self.names]
        for count, content in database.execute(
            "SELECT count, content FROM blocks WHERE series = ? AND start BETWEEN ? AND ? "
            "ORDER BY start",
            (series, first - first % (width * BLOCK), until),
        ):
            for column, more in zip(found, self.unpack(count, content), strict=True):
                column += more
        return found


VALUES: Final = Form(
    {
        "finite": ("q", sum),
        "total": ("d", sum),
        "low": ("d", min),
        "high": ("d", max),
        "last": ("d", _latest),
        "nonfinite": ("q", sum),
        "epoch": ("d", _latest),
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
        """The bucket as others know it: what is not known is None."""
        first, until, first_ns, last_ns, finite, total, low, high, last, nonfinite, epoch = row
        return cls(
            first=first,
            until=until,
            first_ns=first_ns,
            last_ns=last_ns,
            finite=finite,
            total=total,
            low=low if finite else None,
            high=high if finite else None,
            last=None if math.isnan(last) else last,
            nonfinite=nonfinite,
            epoch=None if math.isnan(epoch) else epoch,
        )


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
    def of(cls, rows: Sequence[Row]) -> StepBucket:
        """Of each rank one."""
        row = STEPS.together(rows)
        shared = len(row) - len(MEASURED_PHASES)
        phases_ns = dict(zip(MEASURED_PHASES, row[shared:], strict=True))
        return cls._make((len(rows), *row[:shared], phases_ns))
