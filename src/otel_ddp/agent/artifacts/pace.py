"""Keeps the reading of artifacts below a number of bytes a second, and ends it when asked to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CHUNK_BYTES = 1024 * 1024


class Stopped(Exception):
    """The agent ends: the next one goes on."""


class Pace:
    """One an agent."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        stopping: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopping = stopping or threading.Event()
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = clock()

    def take(self, count: int) -> None:
        """Wait until so many more bytes may be read. Raises `Stopped`."""
        now = self._clock()
        self._free_at = max(now, self._free_at) + count / self._bytes_per_s
        if self.stopping.wait(max(0.0, self._free_at - now)):
            raise Stopped
