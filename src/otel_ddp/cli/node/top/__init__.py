"""otel-ddp top: the ranks of this node live, with their phases, work, GPUs, verdicts and values."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

from otel_ddp.cli.node.top import frame
from otel_ddp.cli.node.top.frame import SORTS, Choice
from otel_ddp.cli.node.top.watch import Watch
from otel_ddp.cli.options import add_directory_option
from otel_ddp.cli.text import padded, print_answer
from otel_ddp.errors import ConfigError

_LEAST_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once", action="store_true", help="print what is there now, for pipes and scripts"
    )
    parser.add_argument("--filter", default="", help="only ranks with these words, as by the key /")
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help="as by the key s")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between two looks"
    )
    add_directory_option(parser)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _LEAST_INTERVAL_S <= seconds <= 3600:
        raise argparse.ArgumentTypeError(
            f"must be {_LEAST_INTERVAL_S} to 3600 seconds, got {text!r}"
        )
    return seconds


def run(options: argparse.Namespace) -> int:
    choice = Choice(options.sort, options.filter)
    watch = Watch(options.dir)
    try:
        view = watch.look()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.once:
        heads = frame.heads(view)
        table = padded([heads, *(row.cells for row in frame.rows(view, choice))], frame.RIGHT)
        return print_answer("\n".join((*frame.above(view, choice), *table)))
    if why := _why_not_live():
        print(f"{why}; `otel-ddp top --once` prints one picture of it.", file=sys.stderr)
        return 2
    from otel_ddp.cli.node.top.app import TopApp

    app = TopApp(watch, choice, interval_s=options.interval)
    # Without the mouse, text can be selected as in any program.
    app.run(mouse=False)
    return app.return_code or 0


def _why_not_live() -> str:
    """Why there can be no live picture here; empty if there can."""
    if find_spec("textual") is None:
        return "The live picture needs textual: pip install 'otel-ddp[top]'"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "The live picture needs a terminal"
    if os.environ.get("TERM", "dumb") == "dumb":
        return "The live picture needs a terminal that can move its cursor (TERM is dumb or unset)"
    return ""
