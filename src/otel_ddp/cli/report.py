"""otel-ddp report: writes a run's report as one HTML page and as JSON."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.cli.command import add_run_argument, history_directory, print_answer, print_json
from otel_ddp.history.whole_run import WholeRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write report.html, one page that needs no network, and report.json, from the history of a "
        "run."
    )
    add_run_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the two files go (default: a folder here, named after the run)",
    )
    how.add_argument(
        "--card", action="store_true", help="print the end of the run, and write nothing"
    )
    how.add_argument(
        "--json", action="store_true", help="print report.json, for programs, and write nothing"
    )


def run(options: argparse.Namespace) -> int:
    from otel_ddp.history import report
    from otel_ddp.history.card import lines
    from otel_ddp.history.directory import find_run
    from otel_ddp.history.page import answers
    from otel_ddp.history.page.http import as_json

    # Read everything inside of this `with`: if reading fails since the history is damaged, it
    # raises an error that says so.
    with find_run(options.which or "", history_directory()) as run:
        postmortems = postmortems_of(run)
        document = report.gather(run, postmortems)
        if options.json:
            return print_json(document)
        if options.card:
            return print_answer("\n".join(lines(report.card_of(document))))
        name = re.sub(r"[^\w.-]+", "_", run.name).strip(".")[:100] or "run"
        out = options.out or Path(f"report-{name}")
        html = out / "report.html"
        shown = "\n".join(lines(report.card_of(document, [str(html.absolute())])))
        content = answers.saved(run, postmortems)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_bytes(as_json(200, document).body)
        html.write_text(content, encoding="utf-8")
    except OSError as error:
        print(f"otel-ddp report: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return print_answer(shown)


def postmortems_of(run: WholeRun) -> list[dict[str, Any]]:
    """The post-mortems of a run on this node; raises ConfigError."""
    from otel_ddp.history.directory import postmortems

    folder = history_directory()
    return postmortems(folder, run.group, run.name) if files.is_kept(folder) else []
