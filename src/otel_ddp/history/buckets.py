"""Aggregates neighbouring values or steps into buckets, and packs buckets into blocks.

A bucket is a tuple: four columns that all buckets have, then the columns of its `Form`. A block is
a database row with up to BLOCK neighbouring buckets of one series, so that a write changes one or
two rows for each series instead of one for each value.
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
"""At most this many buckets are in one block."""
FAR: Final = (1 << 63) - 1
"""A step number that no series reaches: as the end of a range, it means no end."""
# Flag in the head of a block: all numbers of this column are equal, and only one is stored.
_ALIKE = 0x8000

Row = tuple[Any, ...]
Columns = Sequence[Sequence[Any]]
FIRST, UNTIL, FIRST_NS, LAST_NS = range(4)
"""The indices of the columns that all buckets have: first and last step, first and last time."""
FINITE: Final = 4
"""The index of the column `finite` in VALUES."""


_LATEST = itemgetter(-1)
_Column = tuple[str, Callable[[Sequence[Any]], Any]]
_SHARED: Mapping[str, _Column] = {
    "first": ("q", min),
    "until": ("q", max),
    "first_ns": ("q", min),
    "last_ns": ("q", max),
}


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The begin and end of each stretch of equal consecutive numbers."""
    if len({*numbers}) == len(numbers):
        return [*pairwise(range(len(numbers) + 1))]
    begins = [at for at, (one, other) in enumerate(pairwise(numbers), 1) if one != other]
    return [*pairwise([0, *begins, len(numbers)])] if numbers else []


def _pack(columns: Sequence[bytes]) -> bytes:
    """The content of a block: first a head with the position of each column, then the columns.

    A position counts 64-bit words from the end of the head. Equal columns are stored once. If all
    numbers of a column are equal, one number is stored.
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
        """*columns*: by name, its type code for `array`, and the function that merges numbers."""
        self.names = (*_SHARED, *columns)
        self._columns = (*_SHARED.values(), *columns.values())

    def together(self, rows: Sequence[Row]) -> Row:
        """Merge several buckets into one. *rows*: ordered by time."""
        columns = zip(*rows, strict=True)
        return tuple(rule(each) for (_, rule), each in zip(self._columns, columns, strict=True))

    def sum_up(self, columns: Columns, wide: int) -> dict[int, Row]:
        """Merge the buckets of a series into buckets of *wide* steps.

        Returns a mapping: the key of a merged bucket is its first step divided by *wide*, rounded
        down.
        """
        numbers = [first // wide for first in columns[FIRST]]
        runs = _runs(numbers)
        rows = zip(*self._sums(columns, runs), strict=True)
        return dict(zip([numbers[begin] for begin, _ in runs], rows, strict=True))

    def in_pieces(self, columns: Columns, many: int) -> Iterable[Row]:
        """Merge each group of *many* neighbouring buckets into one bucket."""
        runs = _runs([at // many for at in range(len(columns[FIRST]))])
        return zip(*self._sums(columns, runs), strict=True)

    def merged(self, rows: list[Row], width: int) -> Columns:
        """Sort the buckets by step, and merge them into one for each *width* steps."""
        # Values of the same step are sorted by time, so that `last` is the latest.
        rows.sort(key=itemgetter(FIRST, LAST_NS))
        columns = [*zip(*rows, strict=True)]
        return self._sums(columns, _runs([first // width for first in columns[FIRST]]))

    def _sums(self, columns: Columns, runs: Sequence[tuple[int, int]]) -> Columns:
        # Usually each stretch is a single bucket, so there is nothing to merge.
        if len(runs) == len(columns[FIRST]):
            return columns
        return [
            [rule(column[begin:end]) for begin, end in runs]
            for (_, rule), column in zip(self._columns, columns, strict=True)
        ]

    def blocks(self, columns: Columns, width: int) -> Iterable[tuple[int, int, int, bytes]]:
        """Pack buckets, sorted by step, into rows of the file: start, count, first time, content.

        Raises OverflowError if an integer needs more than 64 bits.
        """
        span = width * BLOCK
        numbers = [first // span for first in columns[FIRST]]
        packed: list[tuple[str, Sequence[Any], bytes]] = []
        for (code, _), column in zip(self._columns, columns, strict=True):
            # Reuse equal columns: low, high, last and total of a single value are equal.
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
        """The columns of a block, or only some of them.

        *count*: the number of buckets. *only*: the indices of the wanted columns; all if empty. If
        the block is damaged, raises one of the errors in `reader.DAMAGE`.
        """
        head = memoryview(content)[: 2 * len(self._columns)].cast("H")
        words = memoryview(content)[head.nbytes :]
        views: dict[str, memoryview[Any]] = {"q": words.cast("q"), "d": words.cast("d")}
        # The file may come from another machine and have any content.
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
        """The columns of a series, from the blocks with the steps from *first* to *until*.

        *series*: its id, and the width of its buckets in steps. *only*: the indices of the wanted
        columns; all if empty. Raises sqlite3.Error.
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
    """The form of the buckets of this kind of series."""
    return STEPS if kind == "steps" else VALUES


def value_row(position: int, time_ns: int, value: float, epoch: float | None) -> Row:
    """The bucket of one value. *position*: its step, or the number instead, see `Bucket.first`."""
    epoch = math.nan if epoch is None else epoch
    if math.isfinite(value):
        return (position, position, time_ns, time_ns, 1, value, value, value, value, 0, epoch)
    # The value is not finite, so `low` and `high` must not change those of buckets merged with it.
    extremes = math.inf, -math.inf
    return (position, position, time_ns, time_ns, 0, 0.0, *extremes, value, 1, epoch)


# Map phase codes of the journal to the index of the phase; unknown codes count as "other".
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
    """The bucket of one step. *codes*: the journal's phase codes, in parallel with *spans_ns*."""
    phases_ns = [0] * len(MEASURED_PHASES)
    for column, span_ns in zip(codes.translate(_COLUMN_OF), spans_ns, strict=True):
        phases_ns[column] += span_ns
    took_ns = ended_ns - began_ns
    times = position, position, began_ns, ended_ns
    return (*times, 1, took_ns, took_ns, took_ns, int(unusual), work, *phases_ns)


class Bucket(NamedTuple):
    """Neighbouring values of one series, merged."""

    first: int
    """The first step. In `node` and `counter` the time in s; of values without steps the number."""
    until: int
    """The last step, time or number of a value, as in `first`."""
    first_ns: int
    last_ns: int
    finite: int
    """The number of finite values. `total`, `low` and `high` are computed from these only."""
    total: float
    low: float | None
    high: float | None
    last: float | None
    """The last value; None if it is NaN."""
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
    """Neighbouring steps of one rank, or of several, merged."""

    ranks: int
    """The number of ranks whose steps are summed."""
    first: int
    until: int
    first_ns: int
    last_ns: int
    steps: int
    took_ns: int
    """The duration, summed over all steps and ranks. `phases_ns` has sums over them too."""
    low_ns: int
    high_ns: int
    unusual: int
    """The number of steps that compiled, saved, evaluated or were skipped."""
    work: int
    """The number of tokens, or of samples if tokens are unknown."""
    phases_ns: dict[str, int]
    """The time in each phase. `comm_wait` is waiting for other ranks; all others are work."""

    @classmethod
    def of(cls, row: Row, ranks: int = 1) -> StepBucket:
        """The bucket of a row."""
        shared = len(row) - len(MEASURED_PHASES)
        phases_ns = dict(zip(MEASURED_PHASES, row[shared:], strict=True))
        return cls._make((ranks, *row[:shared], phases_ns))
