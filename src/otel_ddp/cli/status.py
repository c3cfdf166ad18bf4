"""otel-ddp status: shows the runs, ranks and GPUs of this node, once or live."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable

from otel_ddp.cli.command import (
    add_directory_option,
    end_by_signals,
    find_places,
    print_answer,
    print_json,
)
from otel_ddp.cli.picture import Line, picture
from otel_ddp.errors import ConfigError
from otel_ddp.journal.survey import Survey, survey
from otel_ddp.settings import Settings

_EVERY_S = 1.0
_STYLES = {"": "", "bold": "\x1b[1m", "trouble": "\x1b[1;31m", "dim": "\x1b[2m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    how.add_argument("--watch", action="store_true", help="the same live, until Ctrl-C")
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    if options.watch:
        return watch(options.dir)
    if options.json:
        return print_json(_survey(options.dir)[0].to_json())
    columns = _size().columns if _is_terminal() else None
    lines = _picture(options.dir, columns)
    return print_answer("\n".join(styled(lines, coloured=_is_terminal() and has_colours())))


def watch(directory: str) -> int:
    """Show the picture until Ctrl-C; returns the exit status."""
    if not _is_terminal() or os.environ.get("TERM", "dumb") == "dumb":
        raise ConfigError(
            "The live picture needs a terminal, and its name in TERM; `otel-ddp status` prints it "
            "once."
        )
    # Raise errors, as for a directory that does not exist, before the screen is cleared.
    _survey(directory)
    end_by_signals()
    _write("\x1b[2J")
    try:
        while True:
            columns, rows = _size()
            # Leave the last column empty. If a line filled it, the terminal could erase its last
            # character together with the rest of the line.
            lines = _picture(directory, columns - 1, rows)
            # Redraw in place with one write, to avoid flicker.
            shown = "\x1b[K\n".join(styled(lines, coloured=has_colours()))
            _write(f"\x1b[H{shown}\x1b[K\x1b[J")
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return 0
    finally:
        # This fails if the terminal has been closed.
        with contextlib.suppress(OSError):
            _write("\n")


def _picture(directory: str, columns: int | None, rows: int | None = None) -> list[Line]:
    found, conf = _survey(directory)
    named = bool(conf.directory)
    return picture(found, time.time_ns(), agent=conf.agent, named=named, columns=columns, rows=rows)


def _survey(directory: str) -> tuple[Survey, Settings]:
    conf, places, missing = find_places(directory)
    found = survey(places)
    if missing:
        found.unreadable.append(missing)
    return found, conf


# -- the terminal


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def has_colours() -> bool:
    """Whether to use colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _size() -> os.terminal_size:
    """Columns and rows; 80 x 24 if unknown."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return found if all(found) else os.terminal_size((80, 24))


def styled(lines: Iterable[Line], *, coloured: bool) -> list[str]:
    """The lines as text, with escape sequences for their styles if *coloured*."""
    styles = [(_STYLES[each.style] if coloured else "", each.text) for each in lines]
    return [f"{style}{text}\x1b[0m" if style else text for style, text in styles]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
