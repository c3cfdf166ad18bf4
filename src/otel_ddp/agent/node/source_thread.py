"""Reads one source periodically, in a thread of its own, so that no caller waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.errors import containment

T = TypeVar("T")


# Not a NamedTuple: before Python 3.11 those cannot be generic.
@dataclass(frozen=True)
class Sample(Generic[T]):
    """The result of one reading, and its age."""

    value: T
    taken_ns: int
    """When that reading began, in nanoseconds since 1970. If it hung half-way and went on, its
    first numbers are that old."""
    age_s: float
    """How long ago that is, by a clock that is never set."""


class Sampler(Generic[T]):
    """If a driver's call, or a statvfs of a dead file server, never returns, only the age grows.

    Any thread may call these methods; none of them waits for a reading.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        every_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        stopping: threading.Event | None = None,
    ) -> None:
        self.name = name
        self.failures = 0
        self._read = read
        self.every_s = every_s
        self._clock = clock
        self._wall_ns = wall_ns
        self._stopping = stopping or threading.Event()
        # Replaced as a whole, so that value and time always belong together.
        self._last: tuple[T, int, float] | None = None
        self._finished_at = clock()
        self.thread = KeptThread(name, self._run)

    def start(self) -> None:
        """Start the thread; it reads at once."""
        self._finished_at = self._clock()
        self.thread.keep_running()

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; False if it still hangs, and is left behind."""
        self._stopping.set()
        return self.thread.join(timeout_s)

    def latest(self) -> Sample[T] | None:
        """The last reading that succeeded; None before there is one."""
        if self._last is None:
            return None
        value, taken_ns, began_at = self._last
        return Sample(value, taken_ns, self._clock() - began_at)

    def age_s(self) -> float:
        """The time since the last reading that succeeded; before the first one, since the start."""
        return self._clock() - self._finished_at

    def _run(self) -> None:
        while not self._stopping.is_set():
            began_at = self._clock()
            self._read_once(began_at)
            took_s = self._clock() - began_at
            # A reading that took longer than its period does not catch up on the missed ones.
            pause_s = self.every_s - took_s if took_s < self.every_s else self.every_s
            self._stopping.wait(pause_s)

    def _read_once(self, began_at: float) -> None:
        taken_ns = self._wall_ns()
        try:
            self._last = (self._read(), taken_ns, began_at)
            self._finished_at = self._clock()
        except containment.ANY_ERROR:
            self.failures += 1
            containment.record_failure(f"reading the {self.name}")
