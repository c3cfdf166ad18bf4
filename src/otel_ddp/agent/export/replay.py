"""Sends the requests in spools, once to each destination, and removes none of them."""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2s
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Protocol

from otel_ddp.agent.export.otlp.outcome import RETRY_AFTER_LIMIT_S, SIGNALS, Outcome, Signal
from otel_ddp.agent.export.spool_files import LOCK, OFFLINE_PREFIX, Entry, list_entries
from otel_ddp.journal import locks
from otel_ddp.journal.locks import lock_holder

# Between the attempts at one request, once the collector has accepted one: a minute in all.
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_SENT_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class AnotherReplay(Exception):
    """Another process sends the same spool to the same address at this moment."""


class SentLogUnwritable(Exception):
    """The file that remembers sent requests cannot be written; its text says where and why."""


class Sender(Protocol):
    """The part of Transport that a replay uses."""

    def address(self, signal: Signal) -> str: ...

    def send(self, signal: Signal, body: bytes) -> Outcome: ...


class SentLog:
    """Remembers which requests of one spool were sent to one address.

    It is a file in the spool, with a line for each request: the name of the request's file, which
    survives copying. It is locked while it is open, so that two replays do not send the same.
    """

    def __init__(self, spool: Path, address: str) -> None:
        digest = blake2s(address.encode("utf-8", "replace"), digest_size=4).hexdigest()
        self.path = spool / f"sent-{digest}"
        with self._raising_unwritable():
            self._file = os.open(self.path, _SENT_FILE, 0o600)
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
        return lock_holder(self.path / LOCK) is not None


def find_spools(directory: Path) -> list[FoundSpool]:
    """The directory as a spool, or the offline spools in it; raises OSError."""
    own = FoundSpool(directory, list_entries(directory))
    if own.entries:
        return [own]
    paths = sorted(path for path in directory.glob(f"{OFFLINE_PREFIX}*") if path.is_dir())
    spools = [FoundSpool(path, list_entries(path)) for path in paths]
    return [spool for spool in spools if spool.entries]


def merge_by_time(spools: Sequence[FoundSpool]) -> Iterator[tuple[Path, Entry]]:
    """The requests of all spools by time; those of one spool in their own order.

    Merged, because a backend refuses values that are much older than its newest one. If one node
    were sent after the other, all values of the second would be too old.
    """
    dated_spools = []
    for spool in spools:
        times = accumulate((entry.oldest_s for entry in spool.entries), max)
        dated = zip(times, spool.entries, strict=True)
        dated_spools.append([(at, spool.path, entry) for at, entry in dated])
    for _, path, entry in heapq.merge(*dated_spools, key=lambda each: each[0]):
        yield path, entry


@dataclass
class Tally:
    """The outcomes so far."""

    requests: int = 0
    """Requests that the collector accepted."""
    points: int = 0
    """Points in those."""
    done_bytes: int = 0
    """The size on disk of all requests that were tried or left."""
    rejected_points: int = 0
    """Points that the collector dropped out of requests that it accepted."""
    refused_points: Counter[str] = field(default_factory=Counter)
    """Points in refused requests, by reason."""
    damaged: int = 0
    unreadable: dict[str, int] = field(default_factory=dict)
    left: Counter[Signal] = field(default_factory=Counter)
    """Requests that were not sent, because the collector accepts none of their signal now."""
    given_up: dict[Signal, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        troubles = (self.rejected_points, self.refused_points, self.damaged, self.unreadable)
        return not any(troubles) and not self.left


class Replay:
    """One run of `otel-ddp replay`: finds what is left to send, and sends it."""

    def __init__(
        self,
        transport: Sender,
        spools: Sequence[FoundSpool],
        signals: Sequence[Signal] = SIGNALS,
        *,
        again: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._sleep = sleep
        self._logs = contextlib.ExitStack()
        self.tally = Tally()
        with contextlib.ExitStack() as opening:
            self._sent_logs = {
                (spool.path, address): opening.enter_context(
                    contextlib.closing(SentLog(spool.path, address))
                )
                for spool in spools
                for address in {transport.address(signal) for signal in signals}
            }
            self._logs = opening.pop_all()
        found = [each for each in merge_by_time(spools) if each[1].signal in signals]
        before = [each for each in found if each[1] in self._sent_log(*each)]
        self.sent_before = len(before)
        skipped = set() if again else {entry.path for _, entry in before}
        self.pending = [each for each in found if each[1].path not in skipped]

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._logs.close()

    def _sent_log(self, path: Path, entry: Entry) -> SentLog:
        return self._sent_logs[path, self._transport.address(entry.signal)]

    @property
    def size_bytes(self) -> int:
        """The size on disk of all that is to be sent."""
        return sum(entry.size_bytes for _, entry in self.pending)

    @property
    def oldest_s(self) -> int:
        """When the oldest value that is to be sent was measured; 0: there is none."""
        metrics = (entry.oldest_s for _, entry in self.pending if entry.signal == "metrics")
        return min(filter(None, metrics), default=0)

    def send(self) -> Iterator[Tally]:
        """Send one request after the other; yields the outcomes so far after each."""
        for path, entry in self.pending:
            if entry.signal in self.tally.given_up:
                self.tally.left[entry.signal] += 1
            else:
                self._send_one(path, entry)
            self.tally.done_bytes += entry.size_bytes
            yield self.tally

    def _send_one(self, path: Path, entry: Entry) -> None:
        tally = self.tally
        try:
            body = entry.read()
        except OSError as error:
            why = error.strerror or str(error)
            tally.unreadable[why] = tally.unreadable.get(why, 0) + 1
            return
        if body is None:
            tally.damaged += 1
            return
        # It takes long to import, and many commands import this module.
        from otel_ddp.agent.export.otlp.split import Piece, halves

        left, refused = [Piece(body, entry.points)], False
        while left:
            piece = left.pop(0)
            outcome = self._send_with_retries(entry.signal, piece.body)
            if outcome.too_large and (parts := halves(entry.signal, piece.body)):
                left[:0] = parts
            elif outcome.kind == "retry" and not outcome.doubtful:
                tally.given_up[entry.signal] = outcome.why
                tally.left[entry.signal] += 1
                return
            elif outcome.kind == "delivered":
                tally.points += piece.points
                tally.rejected_points += outcome.rejected
            else:
                # Not remembered: the collector may accept it after a change of its configuration.
                refused = True
                tally.refused_points[outcome.why] += piece.points
        if not refused:
            self._sent_log(path, entry).add(entry)
            tally.requests += 1

    def _send_with_retries(self, signal: Signal, body: bytes) -> Outcome:
        outcome = self._transport.send(signal, body)
        for pause_s in PAUSES_S:
            # Before the first success, a wrong address is more likely than a busy collector.
            if outcome.kind != "retry" or outcome.doubtful or not self.tally.requests:
                break
            self._sleep(max(pause_s, min(outcome.retry_after_s or 0.0, RETRY_AFTER_LIMIT_S)))
            outcome = self._transport.send(signal, body)
        return outcome
