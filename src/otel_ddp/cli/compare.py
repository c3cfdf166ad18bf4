"""otel-ddp compare: tells what differs between two runs, and fails a job if it is too much."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_ddp.cli.drill.http_api import HttpApi, NoAnswer
from otel_ddp.cli.history_option import add_history_option, history_directory
from otel_ddp.cli.text import print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.history.find_run import NotFound
from otel_ddp.history.reader import Unreadable

if TYPE_CHECKING:
    from otel_ddp.history.compare.side import Side

OK, EXCEEDED, CANNOT = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two runs: step time, the time in each phase, and every value that both have "
        "logged. A run is its name, a history, a folder with one run, a report.json, or "
        "prometheus:URL#RUN; or several of these with commas between them. Exit status: 0, 1 if a "
        "limit of --fail-if is exceeded, 2 if the runs cannot be compared."
    )
    parser.add_argument("a", metavar="A", help="the run to compare with")
    parser.add_argument("b", metavar="B", help="the run that may be better or worse")
    parser.add_argument(
        "--fail-if",
        default="",
        metavar="LIMITS",
        help="fail if B differs from A by more, for example step_time:+5%%,loss:+1%%,"
        "accuracy:-0.01",
    )
    parser.add_argument(
        "--warm-up",
        type=_count,
        metavar="STEPS",
        help="how many first steps to leave out (default: 5 %% of a run, 10 to 500)",
    )
    parser.add_argument("--markdown", metavar="FILE", help="also as Markdown; - prints it instead")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    add_history_option(parser)


def _count(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text!r}")


_PROMETHEUS = "prometheus:"


def _load(words: str, folder: Path, ours: bool) -> list[Side]:
    from otel_ddp.history.compare import sources

    if not words.startswith(_PROMETHEUS):
        return sources.load_all(words, folder, ours=ours)
    from otel_ddp.history.compare import from_prometheus

    url, _, name = words.removeprefix(_PROMETHEUS).partition("#")
    if not url.startswith(("http://", "https://")) or not name:
        raise NotFound(f"{words!r} must be prometheus:http://HOST:9090#RUN.")
    api = HttpApi(url, os.environ.get("PROMETHEUS_TOKEN", ""))

    def ask(path: str, asked: Mapping[str, str]) -> list[Any]:
        answer = api.post(path, asked)
        data = answer.get("data") if isinstance(answer, dict) else None
        result = data.get("result") if isinstance(data, dict) else None
        if not isinstance(result, list):
            raise NotFound(f"{api.name} is no Prometheus.")
        return result

    try:
        return [from_prometheus.read(ask, each.strip()) for each in name.split(",")]
    except NoAnswer as why:
        raise NotFound(f"{api.name}: {why}") from why


def run(options: argparse.Namespace) -> int:
    from otel_ddp.history.compare import comparison, limits, render

    try:
        folder = history_directory(options)
        asked = limits.parse(options.fail_if)
        before, after = (
            _load(words, folder, not options.history) for words in (options.a, options.b)
        )
        found = comparison.compare(before, after, options.warm_up)
        if not found.rows:
            raise NotFound("The two runs have neither steps nor a logged value in common.")
        results = limits.check(asked, found)
    except (ConfigError, limits.BadLimit, NotFound, Unreadable) as why:
        print(f"otel-ddp compare: {why}", file=sys.stderr)
        return CANNOT
    summary = "\n".join(render.markdown(found, results))
    if options.markdown and options.markdown != "-":
        try:
            Path(options.markdown).write_text(summary + "\n")
        except OSError as error:
            print(f"otel-ddp compare: {options.markdown}: {error.strerror}", file=sys.stderr)
            return CANNOT
    if options.json:
        answer = json.dumps(render.to_json(found, results), indent=2)
    elif options.markdown == "-":
        answer = summary
    else:
        answer = "\n".join(render.text(found, results))
    status = print_answer(answer)
    if any(each.outcome == "exceeded" for each in results):
        return EXCEEDED
    return CANNOT if status else OK
