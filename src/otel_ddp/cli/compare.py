"""otel-ddp compare: tells what differs between two runs, and fails a job if one is worse."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from otel_ddp.cli.options import history_directory
from otel_ddp.cli.text import print_answer, print_json

if TYPE_CHECKING:
    from otel_ddp.history.compare.result import Comparison

OK, WORSE, CANNOT = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two runs: step time, the time in each phase, and every value that both have "
        "logged. A run is its name, a history, or a folder with one run; or several of these with "
        "commas between them. Exit status: 0, 1 if B is worse with --fail-if-worse, 2 if the runs "
        "cannot be compared."
    )
    parser.add_argument("a", metavar="A", help="the run to compare with")
    parser.add_argument("b", metavar="B", help="the run that may be better or worse")
    parser.add_argument(
        "--fail-if-worse",
        action="store_true",
        help="fail if any measure of B is worse than that of A by more than chance explains",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(options: argparse.Namespace) -> int:
    from otel_ddp.history.compare import render

    found = compared(options.a, options.b)
    if options.json:
        status = print_json(found.to_json())
    else:
        status = print_answer("\n".join(render.text(found)))
    if options.fail_if_worse and found.is_worse:
        return WORSE
    return CANNOT if status else OK


def compared(a: str, b: str, *, paths: bool = True) -> Comparison:
    """Two sides by the words of a user; raises NotFound or reader.Unreadable.

    *paths*: as in find_run.
    """
    from otel_ddp.history.compare import result, rows
    from otel_ddp.history.directory import NotFound

    folder = history_directory()
    found = result.compare(*(rows.load(words, folder, paths=paths) for words in (a, b)))
    if not found.rows:
        raise NotFound("The two runs have neither steps nor a logged value in common.")
    return found
