"""Delivers what spools hold, once to each destination, and removes none of it."""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from otel_ddp import files
from otel_ddp.agent.export.otlp.outcome import SIGNALS, Request, Signal
from otel_ddp.agent.export.spool import LOCK, OFFLINE_PREFIX, Entry, Why, list_entries
from otel_ddp.journal import locks

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery

# After so many failures without a success, a minute or two, the rest of a signal is left.
_MOST_FAILURES = 7


class AnotherReplay(Exception):
    """Another process sends the same spool to the same address at this moment."""


class SentLogUnwritable(Exception):
    """The file that remembers sent requests cannot be written; its text says where and why."""


class SentLog:
    """Remembers which requests of one spool were sent to one address.

    It is a file in the spool, with a line for each request: the name of the request's file, which
    survives copying. It is locked while it is open, so that two replays do not send the same.
    """

    def __init__(self, spool: Path, address: str) -> None:
        digest = blake2s(address.encode("utf-8", "replace"), digest_size=4).hexdigest()
        self.path = spool / f"sent-{digest}"
        with self._raising_unwritable():
            self._file = files.open_private(self.path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(self._file)
            with self._raising_unwritable():
                self._names = self._read(f"# {address}\n".encode("utf-8", "replace"))
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, head: bytes) -> set[str]:
        content = b""
        while piece := os.read(self._file, 1 << 20):
            content += piece
        # A kill may have torn the last line: then its request was not remembered.
        whole = content.rpartition(b"\n")[0]
        os.ftruncate(self._file, len(whole) + 1 if whole else 0)
        os.lseek(self._file, 0, os.SEEK_END)
        if not whole:
            os.write(self._file, head)
        return set(whole.decode("utf-8", "replace").split("\n"))

    @contextlib.contextmanager
    def _raising_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SentLogUnwritable(f"{self.path} cannot be written: {error.strerror}") from None

    def __contains__(self, entry: Entry) -> bool:
        return entry.path.name in self._names

    def add(self, entry: Entry) -> None:
        """Remember a request; once this returns, a kill does not undo it."""
        self._names.add(entry.path.name)
        with self._raising_unwritable():
            os.write(self._file, f"{entry.path.name}\n".encode())

    def close(self) -> None:
        os.close(self._file)


def _lock(file: int) -> None:
    try:
        locks.acquire(file)
    except BlockingIOError:
        raise AnotherReplay from None
    except OSError:
        pass  # a file system without locks


@dataclass(frozen=True)
class FoundSpool:
    """A spool and the requests that were found in it."""

    path: Path
    entries: Sequence[Entry]

    @property
    def missing(self) -> int:
        """How many of the requests that an offline agent put here are no longer here."""
        # An agent that sends empties its own spool.
        offline = self.path.name.startswith(OFFLINE_PREFIX) and self.entries
        return self.entries[-1].number - len(self.entries) if offline else 0

    @property
    def in_use(self) -> bool:
        """Whether a living agent still adds requests."""
        return locks.lock_holder(self.path / LOCK) is not None


def find_spools(directory: Path) -> list[FoundSpool]:
    """The directory as a spool, or the offline spools in it. Raises OSError."""
    own = FoundSpool(directory, list_entries(directory))
    if own.entries:
        return [own]
    paths = sorted(path for path in directory.glob(f"{OFFLINE_PREFIX}*") if path.is_dir())
    spools = [FoundSpool(path, list_entries(path)) for path in paths]
    return [spool for spool in spools if spool.entries]


def merge_by_time(spools: Sequence[FoundSpool]) -> Iterator[Entry]:
    """The requests of all spools by time; those of one spool in their own order.

    Merged, because a backend refuses values that are much older than its newest one. If one node
    were sent after the other, all values of the second would be too old.
    """
    dated_spools = []
    for spool in spools:
        times = accumulate((entry.oldest_s for entry in spool.entries), max)
        dated_spools.append(zip(times, spool.entries, strict=True))
    for _, entry in heapq.merge(*dated_spools, key=lambda each: each[0]):
        yield entry


class KeptRequests:
    """What is left to send, as the delivery takes it from a spool."""

    problem = None
    has_room = True

    def __init__(
        self,
        spools: Sequence[FoundSpool],
        address: Callable[[Signal], str],
        signals: Sequence[Signal] = SIGNALS,
        *,
        again: bool = False,
    ) -> None:
        """*address*: where a signal is sent to. *again*: also what was sent there before."""
        self._address = address
        self._logs: dict[tuple[Path, str], SentLog] = {}
        try:
            for spool in spools:
                for there in {address(signal) for signal in signals}:
                    self._logs[spool.path, there] = SentLog(spool.path, there)
        except BaseException:
            self.close()
            raise
        found = [each for each in merge_by_time(spools) if each.signal in signals]
        before = [each for each in found if each in self._log(each)]
        self.sent_before = len(before)
        skipped = set() if again else {each.path for each in before}
        self._left: dict[Signal, deque[Entry]] = {signal: deque() for signal in SIGNALS}
        for each in found:
            if each.path not in skipped:
                self._left[each.signal].append(each)
        self.dropped_points: Counter[str] = Counter()

    def close(self) -> None:
        """Let another replay of the same spools begin."""
        for log in self._logs.values():
            log.close()

    def _log(self, entry: Entry) -> SentLog:
        return self._logs[entry.path.parent, self._address(entry.signal)]

    @property
    def left(self) -> dict[Signal, int]:
        """How many requests of each signal."""
        return {signal: len(entries) for signal, entries in self._left.items() if entries}

    @property
    def entries(self) -> int:
        return sum(self.left.values())

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for of in self._left.values() for entry in of)

    @property
    def oldest_s(self) -> int:
        """When the oldest value that is to be sent was measured; 0: there is none."""
        return min(filter(None, (each.oldest_s for each in self._left["metrics"])), default=0)

    def oldest(self, signal: Signal) -> Entry | None:
        return self._left[signal][0] if self._left[signal] else None

    def append(self, request: Request) -> None:
        """There is nothing to add."""

    def protect(self, entry: Entry) -> None:
        """Nothing here is dropped to make room."""

    def unprotect(self, entry: Entry) -> None:
        """Nothing here is dropped to make room."""

    def remove(self, entry: Entry, why: Why) -> None:
        """Done with; the next replay tries again what is refused."""
        self._left[entry.signal].remove(entry)
        if why == "corrupt":
            self.dropped_points[why] += entry.points
        elif why == "delivered":
            self._log(entry).add(entry)


def send(
    kept: KeptRequests, delivery: Delivery, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Send all that is taken; comes back after each attempt."""
    for signal in SIGNALS:
        while (wait_s := delivery.send_next(signal)) is not None:
            yield
            if wait_s:
                # Before the first success, a wrong address is more likely than a busy collector.
                failures, status = delivery.failures(signal), delivery.status()
                if failures >= _MOST_FAILURES or not status.delivered:
                    break
                sleep(wait_s)
