"""What a source of numbers is made of: measurements, files of the kernel, a thread."""

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
    """The labels of the node, the run or the rank are prepended to these attributes later."""

    metric: Metric
    value: float
    attributes: tuple[tuple[str, str], ...] = ()
    start_ns: int = 0
    """Since when a counter counts, in nanoseconds since 1970; 0 if it is not a counter."""


def boot_ns() -> int:
    """When the machine was started, in nanoseconds since 1970.

    To the second: a counter's start must not move when the clock is corrected a little.
    """
    boottime = time.CLOCK_BOOTTIME
    # Of three, since a pause between the two clocks makes it earlier.
    found_ns = max(time.time_ns() - time.clock_gettime_ns(boottime) for _ in range(3))
    return round(found_ns / _NS_PER_S) * _NS_PER_S


log = logging.getLogger("otel_ddp.agent")

# The machine, the container or the device lacks this file; or the process has ended.
_NOT_THERE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV, errno.ENXIO),
    *(errno.EOPNOTSUPP, errno.EINVAL),
)
_FRESH_PERIODS = 3

T = TypeVar("T")


class KernelFiles:
    """The files of one source; the log says once which could not be read."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, path: str, parse: Callable[[str], T], place: str = "") -> T | None:
        """What *parse* makes of a file; None where there is none, or where it makes no sense.

        *place*: its name in the log if its path has a process id in it.
        """
        return self._attempt(
            place or path, lambda: parse(files.read(path).decode("utf-8", "replace"))
        )

    def names(self, folder: str, place: str = "") -> list[str] | None:
        """The names in a folder; None if there is none."""
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
        if place not in self._said:
            self._said.add(place)
            log.info("%s is left out: %s.", place, why)
        return None


def numbers(text: str) -> dict[str, int]:
    """The numbers of a file whose lines begin with a name and a number."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


class Sampler:
    """If a read never returns, as in a hung driver, only the age grows.

    Any thread may call these methods; none of them waits for a reading.
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
        # Replaced as a whole, so that value and time always belong together.
        self._last: tuple[Any, int, float] | None = None
        self._finished_at = clock()
        self.thread = KeptThread(name, self._run)

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; False if it still hangs, and is left behind."""
        self._stopping.set()
        return self.thread.join(timeout_s)

    def fresh(self) -> tuple[Any, int] | None:
        """The last reading, and when it began, in nanoseconds since 1970; None if it is old.

        Better no number than one of another time.
        """
        if self._last is None:
            return None
        value, taken_ns, began_at = self._last
        # By a clock that is never set.
        return None if self._is_old(began_at) else (value, taken_ns)

    def hangs(self) -> bool:
        """Whether no reading has come to its end for too long."""
        return self._is_old(self._finished_at)

    def age_s(self) -> float:
        """The time since the last reading that succeeded; before the first one, since the start."""
        return self._clock() - self._finished_at

    def _is_old(self, moment: float) -> bool:
        return self._clock() - moment > _FRESH_PERIODS * self._every_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            began_at = self._clock()
            self._read_once(began_at)
            took_s = self._clock() - began_at
            # A reading that took longer than its period does not catch up on the missed ones.
            pause_s = self._every_s - took_s if took_s < self._every_s else self._every_s
            self._stopping.wait(pause_s)

    def _read_once(self, began_at: float) -> None:
        taken_ns = self._wall_ns()
        try:
            self._last = (self._read(), taken_ns, began_at)
            self._finished_at = self._clock()
        except errors.ANY_ERROR:
            errors.record_failure(f"reading the {self.name}")
