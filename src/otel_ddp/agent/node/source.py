"""What a source of numbers is made of: measurements, files of the kernel, a thread."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, NamedTuple, TypeVar

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
_NOT_THERE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV, errno.ENXIO),
    *(errno.EOPNOTSUPP, errno.EINVAL),
}
_MOST_PLACES = 200
_FRESH_PERIODS = 3


class KernelFiles:
    """The files of one source; `errors` counts the numbers that it had to leave out."""

    def __init__(self) -> None:
        self.errors = 0
        self._said: set[str] = set()

    def text(self, path: str, place: str = "") -> str | None:
        """The whole file. *place*: its name in the log if its path has a process id in it."""
        try:
            return files.read(path).decode("utf-8", "replace")
        except OSError as error:
            self.failed(place or path, error)
            return None

    def value(self, path: str) -> int | None:
        """The number that is the whole file."""
        text = self.text(path)
        if text is None:
            return None
        value = number(text.strip())
        if value is None:
            self.leave_out(path, f"{text.strip()[:50]!r} is no number")
        return value

    def numbers(self, path: str, names: Collection[str], place: str = "") -> dict[str, int]:
        """The numbers of the lines that begin with these names."""
        place = place or path
        text = self.text(path, place)
        said: dict[str, str] = {}
        for name, *words in (line.split(None, 2) or [""] for line in (text or "").splitlines()):
            said.setdefault(name.rstrip(":"), words[0] if words else "")
        found = {}
        for name in names if text is not None else ():
            value = number(said.get(name, ""))
            if value is None:
                self.leave_out(place, f"it has no number of {name}")
            else:
                found[name] = value
        return found

    def names(self, folder: str, place: str = "") -> list[str]:
        """The names in a folder."""
        try:
            return os.listdir(folder)
        except OSError as error:
            self.failed(place or folder, error)
            return []

    def failed(self, place: str, error: OSError) -> None:
        """Count an error, unless it only means that there is no such file."""
        if error.errno not in _NOT_THERE:
            self.leave_out(place, error.strerror or str(error))

    def leave_out(self, place: str, what: str) -> None:
        """Count a number that is left out; log it once a place."""
        self.errors += 1
        if place not in self._said and len(self._said) < _MOST_PLACES:
            self._said.add(place)
            log.info("A number of %s is left out: %s.", place, what)


def number(word: str) -> int | None:
    """A count of the kernel: not negative, and at most 64 bits."""
    if not (word.isascii() and word.isdigit() and len(word) <= 20):
        return None
    value = int(word)
    return value if value < 1 << 64 else None


T = TypeVar("T")


class Sampler(Generic[T]):
    """If a read never returns, as in a hung driver, only the age grows.

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
        self._every_s = every_s
        self._clock = clock
        self._wall_ns = wall_ns
        self._stopping = stopping or threading.Event()
        # Replaced as a whole, so that value and time always belong together.
        self._last: tuple[T, int, float] | None = None
        self._finished_at = clock()
        self.thread = KeptThread(name, self._run)

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; False if it still hangs, and is left behind."""
        self._stopping.set()
        return self.thread.join(timeout_s)

    def fresh(self) -> tuple[T, int] | None:
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
            self.failures += 1
            errors.record_failure(f"reading the {self.name}")
