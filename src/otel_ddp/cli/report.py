"""otel-ddp report: writes what is known of a run into files that need no server."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from otel_ddp import files, settings
from otel_ddp.cli.history_option import add_history_option, history_directory
from otel_ddp.cli.text import print_answer
from otel_ddp.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write report.html, one page that needs no network, and report.json, from the history of a "
        "run."
    )
    parser.add_argument(
        "which",
        nargs="?",
        default="",
        metavar="RUN",
        help="its name, GROUP/RUN, its history, or a folder with one run (default: the newest)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the two files go (default: a folder here, named after the run)",
    )
    parser.add_argument(
        "--card", action="store_true", help="print the end of the run, and write nothing"
    )
    add_history_option(parser)


def run(options: argparse.Namespace) -> int:
    from otel_ddp.agent.verdicts import postmortem
    from otel_ddp.history import card, postmortems, profiles
    from otel_ddp.history.find_run import NotFound, find_run, newest_run
    from otel_ddp.history.page import saved
    from otel_ddp.history.reader import Unreadable
    from otel_ddp.history.report import facts, run_card

    try:
        conf, folder = settings.read(), history_directory(options)
        # A folder that is named here and now may be anybody's.
        ours = not options.history
        found = (
            find_run(options.which, folder, ours=ours)
            if options.which
            else newest_run(folder, ours=ours)
        )
        # All of it before the history is closed, which says so if it is damaged.
        with found:
            named = found.group, found.name
            reports = postmortem.directory(conf.postmortem_directory)
            beside = (
                postmortems.of_run([*filter(files.is_kept, [reports])], *named),
                profiles.of_run(*named),
            )
            report = facts.gather(found, *beside)
            if options.card:
                return print_answer("\n".join(card.lines(run_card.of_report(report))))
            out = options.out or Path(_folder_name(report["run"]["run"]))
            html = out / "report.html"
            shown = "\n".join(card.lines(run_card.of_report(report, [str(html.absolute())])))
            content = saved.page(found.histories, run_card.cost_words(report["cost"]), *beside)
    except (ConfigError, NotFound, Unreadable) as why:
        print(f"otel-ddp report: {why}", file=sys.stderr)
        return 2
    try:
        out.mkdir(parents=True, exist_ok=True)
        # NaN is no JSON: values that are not finite are null.
        (out / "report.json").write_text(json.dumps(_finite(report)) + "\n")
        html.write_text(content, encoding="utf-8")
    except OSError as error:
        print(f"otel-ddp report: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return print_answer(shown)


def _folder_name(run: str) -> str:
    return "report-" + (re.sub(r"[^\w.-]+", "_", run).strip(".")[:100] or "run")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
