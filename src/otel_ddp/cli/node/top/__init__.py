"""otel-ddp top: the ranks of this node live, with their phases, work, GPUs, verdicts and values."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

from otel_ddp.cli.node.top import frame
from otel_ddp.cli.node.top.frame import Choice
from otel_ddp.cli.node.top.watch import Watch
from otel_ddp.cli.options import add_directory_option
from otel_ddp.cli.text import padded, print_answer
from otel_ddp.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once", action="store_true", help="print what is there now, for pipes and scripts"
    )
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    watch = Watch(options.dir)
    try:
        view = watch.look()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.once:
        heads, choice = frame.heads(view), Choice()
        table = padded([heads, *(row.cells for row in frame.rows(view, choice))], frame.RIGHT)
        return print_answer("\n".join((*frame.above(view, choice), *table)))
    if why := _why_not_live():
        print(f"{why}; `otel-ddp top --once` prints one picture of it.", file=sys.stderr)
        return 2
    from otel_ddp.cli.node.top.app import TopApp

    app = TopApp(watch)
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
