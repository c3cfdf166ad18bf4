"""otel-ddp compare: shows what differs between two runs, and fails a job if one is worse."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from otel_ddp.cli.command import history_directory, run_name, show
from otel_ddp.history import compare
from otel_ddp.history.compare import Comparison, Differing
from otel_ddp.history.directory import NotFound
from otel_ddp.history.terminal import aligned, printable

OK, WORSE, CANNOT = 0, 1, 2
_MOST_SETTINGS, _LONGEST_SETTING = 20, 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two runs: step time, the time in each phase, and every value that both have "
        "logged. A run is its name, a history, or a folder with one run. Exit status: 0, 1 if B is "
        "worse with --fail-if-worse, 2 if the runs cannot be compared."
    )
    parser.add_argument("a", type=run_name, metavar="A", help="the run to compare with")
    parser.add_argument("b", type=run_name, metavar="B", help="the run that may be better or worse")
    parser.add_argument(
        "--fail-if-worse",
        action="store_true",
        help="fail if any measure of B is worse than that of A by more than chance explains",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(options: argparse.Namespace) -> int:
    found = compared(options.a, options.b)
    status = show(found.to_json(), lines(found), as_json=options.json)
    if options.fail_if_worse and any(row.verdict == "worse" for row in found.rows):
        return WORSE
    return CANNOT if status else OK


def compared(a: str, b: str, *, paths: bool = True) -> Comparison:
    """Compare two runs by their names or paths, with the arguments and errors of `find_run`."""
    folder = history_directory()
    found = compare.compare(*(compare.load(words, folder, paths=paths) for words in (a, b)))
    if not found.rows:
        raise NotFound("The two runs have neither steps nor a logged value in common.")
    return found


def lines(found: Comparison) -> Iterator[str]:
    """The comparison as lines for a terminal."""
    for letter, side in (("A", found.before), ("B", found.after)):
        yield f"{letter}  {printable(side.title)}"
    for title, differing in (
        ("These differ, and may explain what follows:", found.conditions),
        ("Settings that differ:", found.config),
    ):
        if differing:
            yield f"\n{title}"
            yield from (f"  {printable(_of_both(each))}" for each in differing[:_MOST_SETTINGS])
        if (more := len(differing) - _MOST_SETTINGS) > 0:
            yield f"  and {more} more"
    for heads, rows in compare.tables(found):
        yield ""
        clean = [[printable(cell) for cell in row] for row in rows]
        yield from aligned([heads, *clean], right=heads[1:])
    yield ""
    yield from map(printable, found.notes())
    yield printable(found.conclusion)


def _of_both(each: Differing) -> str:
    name, before, after = (
        word if len(word) <= _LONGEST_SETTING else f"{word[: _LONGEST_SETTING - 1]}…"
        for word in each
    )
    return f"{name}: {before} → {after}"
