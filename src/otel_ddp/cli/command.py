"""What several commands share: options, the directories that they read, and their output."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from otel_ddp import files, settings
from otel_ddp.errors import ConfigError
from otel_ddp.history.directory import default_directory
from otel_ddp.history.page.http import json_text
from otel_ddp.history.terminal import printable, when
from otel_ddp.journal.place import Place, existing
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS


def add_directory_option(parser: argparse.ArgumentParser) -> None:
    """Add --dir, the same for all commands."""
    parser.add_argument(
        "--dir",
        type=_directory,
        default="",
        help="the directory of journals and agent (default: OTEL_DDP_DIR, else one on tmpfs)",
    )


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN, the same for all commands that read one history."""
    parser.add_argument(
        "which",
        nargs="?",
        type=run_name,
        metavar="RUN",
        help="its name, GROUP/RUN, its history, or a folder with one run (default: the newest)",
    )


def run_name(text: str) -> str:
    """Check the name of a run. An empty one is an error, as from an unset variable of a script."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a run is empty")
    return text


def _directory(text: str) -> str:
    # Unlike OTEL_DDP_DIR, the option may be relative to the current directory.
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def find_places(directory: str) -> tuple[settings.Settings, list[Place], str]:
    """The settings, the existing directories of journals, and a remark.

    If the directory of OTEL_DDP_DIR does not exist yet, the remark says so; else it is empty.
    Raises ConfigError for a --dir that does not exist, and for an unreadable directory: to return
    no directory would look as if nothing ran.
    """
    conf = settings.read(directory=directory or None)
    path = Path(conf.directory)
    if not conf.directory:
        return conf, existing("", os.environ), ""
    if why := _why_unreadable(path):
        raise ConfigError(f"{path} cannot be read ({why}).")
    if path.exists():
        return conf, [Place(path)], ""
    if directory:
        raise ConfigError(f"{path} does not exist.")
    return conf, [], f"{path} (OTEL_DDP_DIR) does not exist yet: nothing has recorded there"


def _why_unreadable(path: Path) -> str:
    """The reason why a directory cannot be read; empty if it can be read, or does not exist."""
    try:
        files.check_kept(path)
        with files.own_directory(path):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror)


def history_directory() -> Path:
    """The directory in which runs are looked up by name."""
    return default_directory(settings.value("OTEL_DDP_HISTORY_DIR", os.environ) or "")


# -- output


def print_answer(text: str) -> int:
    """Print text in the terminal's encoding; returns the exit status."""
    try:
        print(text)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more when it exits, and would report the same error again. So
        # redirect stdout to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # closed by the reader, as in `| head`
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, so that `finally` blocks clean up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def print_json(document: Any) -> int:
    """Print a document for programs; returns the exit status."""
    return print_answer(json_text(document, indent=2))


def show(document: Any, lines: Iterable[str], *, as_json: bool) -> int:
    """Print a document for programs, or its lines for people; returns the exit status."""
    return print_json(document) if as_json else print_answer("\n".join(lines))


def cell(value: Any, otherwise: str = "") -> str:
    """Any value as one printable line, with control characters escaped."""
    if value is None or value == "":
        return otherwise
    text = json.dumps(value, default=repr) if isinstance(value, (dict, list)) else str(value)
    return printable(text)


def dated(verdict: Mapping[str, Any], now_ns: int) -> str:
    """A verdict's sentence after its time."""
    return when(verdict, now_ns) + cell(verdict.get("sentence"), "?")


def marked(verdict: Mapping[str, Any], now_ns: int) -> str:
    """A line on a verdict: `!`, or `i` if it is harmless, and then its time and its sentence."""
    mark = "i" if verdict.get("kind") in HARMLESS_VERDICTS else "!"
    return f"{mark} {dated(verdict, now_ns)}"
