"""Shows how far a replay is: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TextIO

from otel_ddp.agent.export.replay import Tally

_WIDTH = 30
_LINE_EVERY_S = 10.0
_DRAW_EVERY_S = 0.1


class ProgressBar:
    """The progress of one replay."""

    def __init__(
        self,
        stream: TextIO,
        requests: int,
        size_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._requests = requests
        self._size_bytes = max(size_bytes, 1)
        self._clock = clock
        self._terminal = stream.isatty()
        self._began = self._shown_at = clock()
        self._drawn = ""

    def show(self, tally: Tally) -> None:
        """Show how far it is, if it is time to."""
        now = self._clock()
        if now - self._shown_at < (_DRAW_EVERY_S if self._terminal else _LINE_EVERY_S):
            return
        self._shown_at = now
        share = tally.done_bytes / self._size_bytes
        left_s = (now - self._began) * (1.0 - share) / max(share, 1e-9)
        text = f"{share:4.0%}  {tally.requests} of {self._requests} requests, {left_s:.0f} s left"
        if not self._terminal:
            print(text.strip(), file=self._stream, flush=True)
            return
        done = int(share * _WIDTH)
        self._draw(f"[{'#' * done}{'.' * (_WIDTH - done)}] {text}")

    def end(self) -> None:
        """Remove the bar."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._terminal and (text or self._drawn):
            with contextlib.suppress(OSError):
                print(f"\r{text.ljust(len(self._drawn))}", end="", file=self._stream)
                print(end="" if text else "\r", file=self._stream, flush=True)
            self._drawn = text
