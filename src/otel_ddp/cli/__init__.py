"""The otel-ddp command: one file per subcommand, each imported only when it is called."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from otel_ddp import __version__
from otel_ddp.journal import system

_COMMANDS = {
    "agent": "run the node agent here, in the foreground",
    "demo": "train a small model with two ranks and show what was recorded",
    "doctor": "check the whole installation, and say what to do",
    "replay": "send what offline runs have kept on disk",
    "stacks": "show what the Python threads of this node's ranks are at",
    "status": "say what runs on this node: agent, endpoint, runs, ranks, GPUs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] and given[0] in _COMMANDS and (lacking := system.missing()):
        # Before the command is imported, which may need one of these.
        print(
            f"otel-ddp {given[0]} needs Linux: this system lacks {lacking}, so nothing is recorded "
            "here, and there is nothing to show.",
            file=sys.stderr,
        )
        return 2
    try:
        asked = _parse(given)
        return int(asked.run(asked))
    except KeyboardInterrupt:
        # Who presses Ctrl-C knows why it ended.
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="otel-ddp", description="OpenTelemetry for distributed PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"otel-ddp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, sentence in _COMMANDS.items():
        sub = commands.add_parser(name, help=sentence, description=sentence)
        if name in given[:1]:
            module = import_module(f"otel_ddp.cli.{name}")
            module.arguments(sub)
            sub.set_defaults(run=module.run)
    return parser.parse_args(given)
