"""The otel-ddp command: one module per subcommand, imported only when it is called."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from otel_ddp import __version__
from otel_ddp.errors import OtelDdpError
from otel_ddp.journal import place

# For each command its module in this package, and its help text.
COMMANDS = {
    "agent": ("agent", "run the node agent here, in the foreground"),
    "compare": ("compare", "compare two runs, and fail a job if one is worse"),
    "demo": ("demo", "train a small model with a fault, and show what was recorded"),
    "doctor": ("doctor", "check the installation, and suggest fixes"),
    "goodput": ("goodput", "show where the time of a run went, over all its attempts"),
    "mcp": ("mcp", "answer an assistant's questions on the runs of this node, over MCP"),
    "open": ("open", "open the page of a run in the browser; without an agent, serve it"),
    "profile": ("profile", "trace the same steps of a suspect and of a healthy rank"),
    "replay": ("replay", "send the data of offline runs"),
    "report": ("report", "write a run's report: one page for people, JSON for programs"),
    "run": ("run", "run a command, and measure every training below it"),
    "runs": ("runs", "list the runs of this node, newest first"),
    "stacks": ("stacks", "show the Python stacks of ranks"),
    "status": ("status", "show what runs on this node: what is wrong, who waits, GPUs"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the terminal's encoding lacks, as in the name of a run or a bar
        # chart, instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    # On a system without Linux's system calls, the import of a command may fail. So check before.
    # `run` needs no such call.
    needs = words[:1] and words[0] in COMMANDS.keys() - {"run"}
    if needs and (lacking := place.missing_calls()):
        print(
            f"otel-ddp {words[0]} needs Linux: this system lacks {lacking}, so nothing is recorded "
            "here, and there is nothing to show.",
            file=sys.stderr,
        )
        return 2
    try:
        options = _parse(words)
        return int(options.run(options))
    except OtelDdpError as why:
        print(f"otel-ddp {words[0]}: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="otel-ddp", description="OpenTelemetry for distributed PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"otel-ddp {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (module_name, sentence) in COMMANDS.items():
        sub = commands.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)
        if name in words[:1]:
            module = import_module(f"otel_ddp.cli.{module_name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    if not words:
        parser.print_help(sys.stderr)
        sys.exit(2)
    return parser.parse_args(words)
