"""The option --history, and the directory of histories that a command looks in."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from otel_ddp.history.directory import default_directory


def add_history_option(parser: argparse.ArgumentParser) -> None:
    """Add --history, the same for all commands that look a run up by its name."""
    parser.add_argument(
        "--history",
        metavar="DIR",
        default="",
        help="where histories lie (default: OTEL_DDP_HISTORY_DIR, else a private one in /var/tmp)",
    )


def history_directory(options: argparse.Namespace) -> Path:
    """The directory that is meant."""
    named = options.history or os.environ.get("OTEL_DDP_HISTORY_DIR", "")
    return default_directory(os.path.expanduser(named))
