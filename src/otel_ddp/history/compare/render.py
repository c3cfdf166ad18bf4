"""Shows the result of a comparison: as tables, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from otel_ddp import shown
from otel_ddp.history.compare.result import Comparison, Differing, percent
from otel_ddp.history.compare.rows import Row, Side
from otel_ddp.history.terminal import aligned, printable

_HEADS = ("per step", "A", "B", "change", "99 % interval", "p", "")
_VALUE_HEADS = ("value, last part", "A", "B", "change", "p", "last A", "last B", "best A", "best B")
_MOST_SETTINGS, _LONGEST_SETTING = 20, 80


class Table(NamedTuple):
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(found: Comparison) -> Iterator[Table]:
    """Of the steps and of the values, in words."""
    if steps := [_step_cells(row) for row in found.rows if not row.of_value]:
        yield Table(_HEADS, steps)
    if values := [_value_cells(row) for row in found.rows if row.of_value]:
        yield Table(_VALUE_HEADS, values)


def _step_cells(row: Row) -> list[str]:
    def show(value: float | None) -> str:
        return shown.seconds(value) if row.unit == "s" else shown.number(value)

    interval = ""
    if row.difference is not None and row.before:
        # None of these is negative, whatever the test reckons with.
        ends = row.difference.low / row.before, row.difference.high / row.before
        interval = " to ".join(percent(max(end, -1.0)) for end in ends)
    cells = [row.name, show(row.before), show(row.after), percent(row.change)]
    return [*cells, interval, _p(row), row.verdict]


def _value_cells(row: Row) -> list[str]:
    cells = [row.shown, shown.number(row.before), shown.number(row.after), percent(row.change)]
    ends = map(shown.number, (*row.last, *row.best))
    return [*cells, f"{_p(row)} {row.verdict}".strip(), *ends]


def _p(row: Row) -> str:
    if row.p is None:
        return row.untested
    return "< 0.0001" if row.p < 1e-4 else f"{row.p:.2g}"


def text(found: Comparison) -> Iterator[str]:
    """For a terminal."""
    for letter, runs in (("A", found.before), ("B", found.after)):
        yield f"{letter}  {printable(titles(runs))}"
    for title, differing in (
        ("These differ, and may explain what follows:", found.conditions),
        ("Settings that differ:", found.config),
    ):
        if differing:
            yield f"\n{title}"
            yield from (f"  {printable(_of_both(each))}" for each in differing[:_MOST_SETTINGS])
        if (more := len(differing) - _MOST_SETTINGS) > 0:
            yield f"  and {more} more"
    for heads, rows in tables(found):
        yield ""
        clean = [[printable(cell) for cell in row] for row in rows]
        yield from aligned([heads, *clean], right=heads[1:])
    yield ""
    yield from map(printable, found.notes())
    yield f"Result: {printable(found.conclusion)}"


def titles(runs: Sequence[Side]) -> str:
    """The name of a run, or of several."""
    names = ", ".join(each.title for each in runs[:5])
    if len(runs) == 1:
        return names
    return f"{names}{', ...' if len(runs) > 5 else ''} ({len(runs)} runs)"


def _of_both(each: Differing) -> str:
    name, before, after = (
        word if len(word) <= _LONGEST_SETTING else f"{word[: _LONGEST_SETTING - 1]}…"
        for word in each
    )
    return f"{name}: {before} → {after}"
