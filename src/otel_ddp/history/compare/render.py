"""Shows a comparison: as text for a terminal, as Markdown for a pull request, as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from otel_ddp.history.compare.comparison import Comparison
from otel_ddp.history.compare.limits import Result, shown_p
from otel_ddp.history.compare.row import LEAST_CHANGE, SIGNIFICANT_P, Row
from otel_ddp.history.compare.side import Side
from otel_ddp.history.quantities import printable, shown_number, shown_s

_HEADS = ("per step", "A", "B", "change", "99 % interval", "p", "")
_VALUE_HEADS = ("value, last part", "A", "B", "change", "p", "last A", "last B", "best A", "best B")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@])")


def text(found: Comparison, results: Sequence[Result]) -> Iterator[str]:
    """For a terminal."""
    for letter, runs in (("A", found.before), ("B", found.after)):
        yield f"{letter}  {printable(titles(runs))}"
    if found.conditions:
        yield ""
        yield "These differ, and may explain what follows:"
        yield from (f"  {printable(_of_both(each))}" for each in found.conditions)
    if found.config:
        yield ""
        yield "Settings that differ:"
        yield from (f"  {printable(_of_both(each))}" for each in found.config[:20])
        if len(found.config) > 20:
            yield f"  and {len(found.config) - 20} more"
    for heads, rows in _tables(found):
        yield ""
        yield from _aligned([heads, *rows])
    yield ""
    yield from notes(found)
    yield f"Result: {conclusion(found)}"
    for each in results:
        yield f"  {printable(each.sentence)}"


def markdown(found: Comparison, results: Sequence[Result]) -> Iterator[str]:
    """For a pull request: everything that a run has named is text, never markup."""
    yield f"### {_plain(titles(found.before))} → {_plain(titles(found.after))}"
    yield ""
    yield f"**{_plain(conclusion(found))}**"
    yield ""
    yield from (f"- {_plain(each.sentence)}" for each in results)
    if results:
        yield ""
    for title, differing in (("not the same", found.conditions), ("config", found.config)):
        if differing:
            words = "; ".join(_of_both(each) for each in differing[:20])
            yield f"{title}: {_plain(words)}"
            yield ""
    for heads, rows in _tables(found):
        yield "| " + " | ".join(heads) + " |"
        yield "|" + "---|" + "---:|" * (len(heads) - 1)
        yield from ("| " + " | ".join(map(_plain, row)) + " |" for row in rows)
        yield ""
    yield "<sub>" + " ".join(notes(found)) + "</sub>"


def to_json(found: Comparison, results: Sequence[Result]) -> dict[str, Any]:
    """For programs; docs/compare.md lists the keys."""
    return {
        "version": 1,
        "a": [each.title for each in found.before],
        "b": [each.title for each in found.after],
        "steps": [each._asdict() for each in found.used],
        "conditions": [dict(zip(("name", "a", "b"), e, strict=True)) for e in found.conditions],
        "config": [dict(zip(("name", "a", "b"), each, strict=True)) for each in found.config],
        "rows": [_json_row(row) for row in found.rows],
        "limits": [
            {
                "limit": each.limit.shown,
                "name": each.row.name,
                "split": each.row.split,
                "change": each.change,
                "outcome": each.outcome,
            }
            for each in results
        ],
        "conclusion": conclusion(found),
    }


def _json_row(row: Row) -> dict[str, Any]:
    low, high = row.interval or (None, None)
    return {
        "name": row.name,
        "split": row.split,
        "kind": "value" if row.of_value else "step",
        "unit": row.unit,
        "a": row.before,
        "b": row.after,
        "change": row.change,
        "beside_the_rest": row.beside is not None,
        "difference_low": low,
        "difference_high": high,
        "p": row.p,
        "untested": row.untested or None,
        "verdict": row.verdict or None,
        "last": list(row.lasts),
        "best": list(row.bests),
    }


def titles(runs: Sequence[Side]) -> str:
    """The name of a run, or of several."""
    names = ", ".join(each.title for each in runs[:5])
    if len(runs) == 1:
        return names
    return f"{names}{', ...' if len(runs) > 5 else ''} ({len(runs)} runs)"


def conclusion(found: Comparison) -> str:
    """One sentence: what differs."""
    worse = [row for row in found.rows if row.verdict == "worse"]
    better = [row for row in found.rows if row.verdict == "better"]
    other = [row for row in found.rows if row.verdict == "differs"]
    parts = [
        f"{word}: {', '.join(f'{row.shown} {_percent(row.change)}' for row in rows)}"
        for word, rows in (("worse", worse), ("better", better), ("different", other))
        if rows
    ]
    if parts:
        return "; ".join(parts)
    if not any(row.difference for row in found.rows):
        return "nothing could be tested"
    return "no significant difference"


def notes(found: Comparison) -> Iterator[str]:
    """How it was tested."""
    for letter, used in zip("AB", found.used, strict=True):
        left = [
            f"{count} {what}"
            for count, what in (
                *((used.warm_up, "to warm up"), (used.unusual, "unusual (checkpoint, ...)")),
                (used.pauses, "with a pause"),
            )
            if count
        ]
        without = f", without {', '.join(left)}" if left else ""
        yield f"{letter}: {used.used} steps{without}."
    how = f"by blocks of up to {found.block} steps" if found.block else "by whole runs"
    yield (
        f"p: {how}, corrected for several tests. Told of: p < {SIGNIFICANT_P:g} and a change of "
        f"{LEAST_CHANGE * 100:g} % or more."
    )
    told = [row for row in found.rows if row.verdict and not row.of_value and found.block]
    for row in told:
        if row.beside is not None:
            yield (
                f"{row.name}: by how much its fast steps changed beside the other phases. What "
                "the machine slows as a whole drops out."
            )
    if any(row.beside is None for row in told):
        yield (
            "One run on each side: where other work shares the machine, equal runs differ as well. "
            "Several on a side, A1,A2,A3 B1,B2,B3, tell the code from the machine."
        )


def _tables(found: Comparison) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
    steps = [row for row in found.rows if not row.of_value]
    if steps:
        yield _HEADS, [_step_cells(row) for row in steps]
    values = [row for row in found.rows if row.of_value]
    if values:
        yield _VALUE_HEADS, [_value_cells(row) for row in values]


def _step_cells(row: Row) -> list[str]:
    def show(value: float | None) -> str:
        return shown_s(value) if row.unit == "s" else shown_number(value)

    interval = ""
    if row.interval is not None and row.before:
        # None of these is negative, whatever the test reckons with.
        interval = " to ".join(_percent(max(end / row.before, -1.0)) for end in row.interval)
    p = row.untested if row.p is None else shown_p(row.p).removeprefix("= ")
    is_beside = row.beside is not None and row.verdict
    return [
        *(row.name, show(row.before), show(row.after), _percent(row.change)),
        *(interval, p, f"{row.verdict}, beside the others" if is_beside else row.verdict),
    ]


def _value_cells(row: Row) -> list[str]:
    p = row.untested if row.p is None else shown_p(row.p).removeprefix("= ")
    return [
        *(row.shown, shown_number(row.before), shown_number(row.after), _percent(row.change)),
        f"{p} {row.verdict}".strip(),
        *map(shown_number, (*row.lasts, *row.bests)),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{round(share * 100, 1) + 0.0:+.1f} %"


def _of_both(each: tuple[str, str, str]) -> str:
    name, before, after = (word if len(word) <= 80 else f"{word[:79]}…" for word in each)
    return f"{name}: {before} → {after}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in clean) for at in range(len(clean[0]))]
    for row in clean:
        first, *others = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _plain(words: str) -> str:
    return _MARKDOWN.sub(r"\\\1", printable(words))
