"""Building blocks of the node's sources: measurements, kernel files, a sampling thread."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from otel_ddp import errors, files
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.vocabulary.catalog import Metric

_NS_PER_S = 1_000_000_000


class Measurement(NamedTuple):
    """One number that was read, still without the labels of node, run and rank."""

    metric: Metric
    value: float
    attributes: tuple[tuple[str, str], ...] = ()
    start_ns: int = 0
    """The start of a counter, in nanoseconds since 1970; 0 for a gauge."""


def boot_ns() -> int:
    """The boot time in nanoseconds since 1970.

    Rounded to seconds: a small correction of the clock must not move the start of counters.
    """
    boottime = time.CLOCK_BOOTTIME
    # Use the latest of three results: a pause between reading the two clocks makes a result too
    # early.
    found_ns = max(time.time_ns() - time.clock_gettime_ns(boottime) for _ in range(3))
    return round(found_ns / _NS_PER_S) * _NS_PER_S


log = logging.getLogger("otel_ddp.agent")

# Errors that are not logged, since they are normal: this machine has no such file, or the process
# has ended.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV)
_FRESH_PERIODS = 3

T = TypeVar("T")


class KernelFiles:
    """Reads the kernel's files for one source. An unreadable file is logged only once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, path: str, parse: Callable[[str], T], place: str = "") -> T | None:
        """Read and parse a file; None if it is absent or unreadable.

        *place*: how the log calls the file, if its path contains a pid.
        """
        return self._attempt(
            place or path, lambda: parse(files.read(path).decode("utf-8", "replace"))
        )

    def names(self, folder: str, place: str = "") -> list[str] | None:
        """The names in a folder; None if the folder is absent or unreadable."""
        return self._attempt(place or folder, lambda: os.listdir(folder))

    def _attempt(self, place: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            why = error.strerror or str(error)
        except (ValueError, LookupError) as error:
            why = f"it makes no sense ({error})"
        if place not in self._logged:
            self._logged.add(place)
            log.info("%s is left out: %s.", place, why)
        return None


def numbers(text: str) -> dict[str, int]:
    """Parse a text in which each line has a name and a number."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


class Sampler:
    """Reads a source periodically in a thread. `age_s` grows while a read hangs, e.g. in a driver.

    Any thread may call the methods; none blocks.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        every_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        stopping: threading.Event | None = None,
    ) -> None:
        self.name = name
        self._read = read
        self._every_s = every_s
        self._clock = clock
        self._wall_ns = wall_ns
        self._stopping = stopping or threading.Event()
        # The last reading: its value, and its start by the wall clock and by the monotonic clock.
        # The tuple is replaced as a whole, so that other threads never see parts of two readings.
        self._last: tuple[Any, int, float] | None = None
        self._finished_at = clock()
        self.thread = KeptThread(name, self._run)

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; False if it hangs and still runs after *timeout_s*."""
        self._stopping.set()
        return self.thread.join(timeout_s)

    def fresh(self) -> tuple[Any, int] | None:
        """The last reading, and its start in nanoseconds since 1970; None if it is stale."""
        if self._last is None:
            return None
        value, taken_ns, began_at = self._last
        # Measure the age by the monotonic clock: the wall clock may be set in the meantime.
        return None if self._is_stale(began_at) else (value, taken_ns)

    def hangs(self) -> bool:
        """Whether the last successful reading is older than three periods."""
        return self._is_stale(self._finished_at)

    def age_s(self) -> float:
        """Seconds since the last successful reading, or since the start."""
        return self._clock() - self._finished_at

    def _is_stale(self, moment: float) -> bool:
        return self._clock() - moment > _FRESH_PERIODS * self._every_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            began_at = self._clock()
            self._read_once(began_at)
            took_s = self._clock() - began_at
            # After a reading that took longer than a period, wait for a whole period: don't make up
            # for missed readings.
            pause_s = self._every_s - took_s if took_s < self._every_s else self._every_s
            self._stopping.wait(pause_s)

    def _read_once(self, began_at: float) -> None:
        taken_ns = self._wall_ns()
        try:
            self._last = (self._read(), taken_ns, began_at)
            self._finished_at = self._clock()
        except errors.ANY_ERROR:
            errors.record_failure(f"reading the {self.name}")
