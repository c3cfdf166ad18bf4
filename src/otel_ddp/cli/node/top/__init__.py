"""otel-ddp top: the ranks of this node live, with their phases, work, GPUs, verdicts and values."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from importlib.util import find_spec

from otel_ddp.cli.node.top import frame
from otel_ddp.cli.node.top.agents import Agents
from otel_ddp.cli.node.top.order import GROUPS, SORTS, Choice
from otel_ddp.cli.node.top.watch import Find, Watch
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import Place

_LEAST_INTERVAL_S = 0.2
# Without a terminal: as wide as what a person reads in a log.
_WIDTH, _HEIGHT = 100, 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once", action="store_true", help="print what is there now, for pipes and scripts"
    )
    parser.add_argument("--filter", default="", help="only ranks with these words, as by the key /")
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help="as by the key s")
    parser.add_argument("--group", choices=GROUPS, default=GROUPS[0], help="as by the key g")
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
    choice = Choice(options.sort, options.group, options.filter)
    find = _finder(options.dir)
    try:
        find()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.once:
        return _print_once(find, choice)
    if why := _why_not_live():
        print(f"{why}; `otel-ddp top --once` prints one picture of it.", file=sys.stderr)
        return 2
    from otel_ddp.cli.node.top.app import TopApp

    app = TopApp(Watch(find), choice, interval_s=options.interval)
    # Without the mouse, text can be selected as in any program.
    app.run(mouse=False)
    return app.return_code or 0


def _finder(directory: str) -> Find:
    def find() -> tuple[Agents, list[Place], str]:
        conf, places, missing = find_places(directory)
        return Agents(conf.web_config), places, missing

    return find


def _why_not_live() -> str:
    """Why there can be no live picture here; empty if there can."""
    if find_spec("textual") is None:
        return "The live picture needs textual: pip install 'otel-ddp[top]'"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "The live picture needs a terminal"
    if os.environ.get("TERM", "dumb") == "dumb":
        return "The live picture needs a terminal that can move its cursor (TERM is dumb or unset)"
    return ""


def _print_once(find: Find, choice: Choice) -> int:
    view = Watch(find).look()
    width = max(20, shutil.get_terminal_size((_WIDTH, _HEIGHT)).columns)
    at = time.strftime("%H:%M:%S", time.localtime(view.now_ns / 1e9))
    lines = [frame.title(view, width, at), frame.head(width)]
    lines += frame.body(view, choice, width)
    return print_answer("\n".join(line.text.rstrip() for line in lines))
