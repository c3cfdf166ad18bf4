"""Shows a picture that changes in a terminal, and leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from otel_ddp.cli.node.picture import Line
from otel_ddp.cli.text import encodable, end_by_signals

_EVERY_S = 1.0
# At most this share of a core: a long picture is drawn less often.
_SHARE = 0.1
# The other screen, without a cursor, and without a new line where a line is too long.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_STYLES = {"": "", "bold": "\x1b[1m", "trouble": "\x1b[1;31m", "dim": "\x1b[2m"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads there."""
    return stream is not None and stream.isatty()


def has_colours() -> bool:
    """Whether a terminal is to show colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def why_not_live() -> str:
    """Why there can be no live picture here; empty if there can."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
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
    """Draw again and again, for the size that the terminal has by then, until q or Ctrl-C."""
    coloured, keys = has_colours(), sys.stdin.fileno()
    end_by_signals()
    with contextlib.suppress(KeyboardInterrupt), _wakes() as woken, _Screen(keys):
        while True:
            columns, rows = size()
            began_s = time.process_time()
            # A line of all columns could lose its last letter to the erasing of the rest.
            lines = [styled(line, coloured) for line in draw(columns - 1, rows)]
            took_s = time.process_time() - began_s
            # In place and at once: nothing flickers.
            _write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
            ready, _, _ = select.select([keys, woken], [], [], max(_EVERY_S, took_s / _SHARE))
            if woken in ready:
                os.read(woken, 4096)
            # Nothing at all is read where the terminal is gone.
            if keys in ready and ((pressed := os.read(keys, 4096)) == b"" or b"q" in pressed):
                return


class _Screen:
    """The other screen of the terminal, with keys that come at once and unseen."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._before = termios.tcgetattr(keys)

    def __enter__(self) -> None:
        signal.signal(signal.SIGTSTP, self._suspend)
        self._begin()

    def __exit__(self, *_: object) -> None:
        # The terminal may be gone.
        with contextlib.suppress(OSError, termios.error):
            self._end()

    def _begin(self) -> None:
        tty.setcbreak(self._keys)
        _write(_ENTER)

    def _end(self) -> None:
        termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)
        _write(_LEAVE)

    def _suspend(self, *_: object) -> None:
        """Ctrl-Z: the shell gets its own screen until it says `fg`."""
        self._end()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._begin()


@contextlib.contextmanager
def _wakes() -> Iterator[int]:
    """A file that can be read after a signal, as of another size."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGWINCH, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(-1)
        os.close(woken)
        os.close(wakes)


def _write(text: str) -> None:
    sys.stdout.write(encodable(text))
    sys.stdout.flush()
