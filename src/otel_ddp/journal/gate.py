"""The gate to a journal: one thread writes at a time, and no signal handler in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
D = TypeVar("D")


class Gate:
    """One a journal. Plain attributes, for `quick_log` goes through it by itself."""

    __slots__ = ("check_due_ns", "closed", "deferred", "inside", "interrupted", "lock")

    def __init__(self) -> None:
        # Progress uses this lock too: two locks taken in turn could deadlock.
        self.lock = threading.RLock()
        self.inside = False
        self.closed = False
        self.deferred: Callable[[], None] | None = None
        self.interrupted = 0
        """How many calls of signal handlers were refused, and are not counted yet."""
        self.check_due_ns = 0
        """When the next check is due; at once if a signal handler was refused."""

    def write(self, act: Callable[[], T], default: D) -> T | D:
        """Writes to the journal, unless it is closed or this interrupts another write."""
        with self.lock:
            if self.closed:
                return default
            if self.inside:
                self.note_reentry()
                return default
            self.inside = True
            try:
                return act()
            finally:
                self.inside = False
                if self.deferred is not None:
                    self.run_deferred()

    def note_reentry(self) -> None:
        """Notes a call of a signal handler that has interrupted a write of its own thread.

        The lock lets it in, but a second write would damage the first one. Even counting it waits.
        """
        self.interrupted += 1
        self.check_due_ns = 0

    def defer(self, act: Callable[[], None]) -> bool:
        """Whether this call interrupted a write. If so, the act is done right after that."""
        with self.lock:
            if self.inside:
                self.deferred = act
            return self.inside

    def run_deferred(self) -> None:
        """Does what was deferred to the end of a write."""
        act, self.deferred = self.deferred, None
        if act is not None:
            act()
