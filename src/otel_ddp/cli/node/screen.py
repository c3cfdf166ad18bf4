"""Shows a picture that changes in a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from otel_ddp.cli.node.picture import Line
from otel_ddp.cli.text import encodable, end_by_signals

_EVERY_S = 1.0
# At most this share of a core: a long picture is drawn less often.
_SHARE = 0.1
_STYLES = {"": "", "bold": "\x1b[1m", "trouble": "\x1b[1;31m", "dim": "\x1b[2m"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads there."""
    return stream is not None and stream.isatty()


def has_colours() -> bool:
    """Whether a terminal is to show colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def why_not_live() -> str:
    """Why there can be no live picture here; empty if there can."""
    if not is_terminal(sys.stdout):
        return "The live picture needs a terminal"
    if os.environ.get("TERM", "dumb") == "dumb":
        return "The live picture needs a terminal that can move its cursor (TERM is dumb or unset)"
    return ""


def size() -> os.terminal_size:
    """Columns and rows of the terminal on stdout; 80 x 24 if it does not tell."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return found if all(found) else os.terminal_size((80, 24))


def styled(line: Line, coloured: bool) -> str:
    """The line as it is printed."""
    style = _STYLES[line.style] if coloured else ""
    return f"{style}{line.text}\x1b[0m" if style else line.text


def show(draw: Callable[[int, int], Iterable[Line]]) -> None:
    """Draw again and again, for the size that the terminal has by then, until Ctrl-C."""
    coloured = has_colours()
    end_by_signals()
    _write("\x1b[2J")
    try:
        while True:
            columns, rows = size()
            began_s = time.process_time()
            # A line of all columns could lose its last letter to the erasing of the rest.
            lines = [styled(line, coloured) for line in draw(columns - 1, rows)]
            took_s = time.process_time() - began_s
            # In place and at once: nothing flickers.
            _write("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")
            time.sleep(max(_EVERY_S, took_s / _SHARE))
    except KeyboardInterrupt:
        pass
    finally:
        # The terminal may be gone.
        with contextlib.suppress(OSError):
            _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(encodable(text))
    sys.stdout.flush()
