"""Sends what spools hold once to each destination, and leaves it where it lies."""

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

from otel_ddp.agent.export.otlp.outcome import SIGNALS, Outcome, Signal
from otel_ddp.agent.export.spool import LOCK, OFFLINE, Entry, listed
from otel_ddp.journal import locks
from otel_ddp.journal.place import lock_holder

# Between the attempts at one request, once anything has been taken: a minute in all.
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_LONGEST_WISH_S = 60.0
_SENT_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class BeingReplayed(Exception):
    """Another process sends the same spool to the same address at this moment."""


class Unwritable(Exception):
    """What was sent cannot be remembered; says where, and why."""


class Sender(Protocol):
    """What a Transport is to us."""

    def address(self, signal: Signal) -> str: ...

    def send(self, signal: Signal, body: bytes) -> Outcome: ...


class Sent:
    """What of one spool was sent to one address: a file in it, with a line for each request.

    A request is known by the name of its file, which survives copying. The file is locked as long
    as it is open, so that two replays do not send the same.
    """

    def __init__(self, spool: Path, address: str) -> None:
        digest = blake2s(address.encode("utf-8", "replace"), digest_size=4).hexdigest()
        self.path = spool / f"sent-{digest}"
        with self._writable():
            self._file = os.open(self.path, _SENT_FILE, 0o600)
        try:
            _lock(self._file)
            with self._writable():
                self._names = self._known(f"# {address}\n".encode("utf-8", "replace"))
        except BaseException:
            os.close(self._file)
            raise

    def _known(self, head: bytes) -> set[str]:
        content = b""
        while piece := os.read(self._file, 1 << 20):
            content += piece
        # What a kill tore off in the middle of a line was not written down.
        whole = content.rpartition(b"\n")[0]
        os.ftruncate(self._file, len(whole) + 1 if whole else 0)
        os.lseek(self._file, 0, os.SEEK_END)
        if not whole:
            os.write(self._file, head)
        return set(whole.decode("utf-8", "replace").split("\n"))

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unwritable(f"{self.path} cannot be written: {error.strerror}") from None

    def __contains__(self, entry: Entry) -> bool:
        return entry.path.name in self._names

    def add(self, entry: Entry) -> None:
        """Remember a request; once this returns, no kill takes it back."""
        self._names.add(entry.path.name)
        with self._writable():
            os.write(self._file, f"{entry.path.name}\n".encode())

    def close(self) -> None:
        os.close(self._file)


def _lock(file: int) -> None:
    try:
        locks.take(file)
    except BlockingIOError:
        raise BeingReplayed from None
    except OSError:
        pass  # a file system without locks


@dataclass(frozen=True)
class Spooled:
    """One spool as it was found."""

    path: Path
    entries: Sequence[Entry]

    @property
    def missing(self) -> int:
        """How many of the requests that an offline agent put here are not here any more."""
        # Other spools are emptied by who sends from them.
        kept = self.path.name.startswith(OFFLINE) and self.entries
        return self.entries[-1].number - len(self.entries) if kept else 0

    @property
    def written(self) -> bool:
        """Whether an agent lives that puts more here."""
        return lock_holder(self.path / LOCK) is not None


def found(directory: Path) -> list[Spooled]:
    """A directory as a spool, or else the offline spools in it; raises OSError."""
    here = Spooled(directory, listed(directory))
    if here.entries:
        return [here]
    paths = sorted(path for path in directory.glob(f"{OFFLINE}*") if path.is_dir())
    spools = [Spooled(path, listed(path)) for path in paths]
    return [spool for spool in spools if spool.entries]


def in_order(spools: Sequence[Spooled]) -> Iterator[tuple[Path, Entry]]:
    """The requests of all spools by time; those of one spool as they were put there.

    Merged, since a backend takes only what is not much older than the newest that it has: one node
    after the other, the second one's would all be too old.
    """
    lanes = []
    for spool in spools:
        times = accumulate((entry.oldest_s for entry in spool.entries), max)
        dated = zip(times, spool.entries, strict=True)
        lanes.append([(at, spool.path, entry) for at, entry in dated])
    for _, path, entry in heapq.merge(*lanes, key=lambda each: each[0]):
        yield path, entry


@dataclass
class Tally:
    """What became of the requests so far."""

    requests: int = 0
    """That were taken."""
    points: int = 0
    done_bytes: int = 0
    """Of all that were dealt with, as they lie on the disk."""
    rejected_points: int = 0
    """Left out by the collector, of requests that it took."""
    refused_points: Counter[str] = field(default_factory=Counter)
    """In requests that the collector does not want, by why."""
    damaged: int = 0
    unreadable: dict[str, int] = field(default_factory=dict)
    left: Counter[Signal] = field(default_factory=Counter)
    """Requests that were not sent, since the collector takes nothing of their signal just now."""
    given_up: dict[Signal, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all of it has arrived."""
        troubles = (self.rejected_points, self.refused_points, self.damaged, self.unreadable)
        return not any(troubles) and not self.left


class Replay:
    """One run of `otel-ddp replay`: what there is to send, and the sending."""

    def __init__(
        self,
        transport: Sender,
        spools: Sequence[Spooled],
        signals: Sequence[Signal] = SIGNALS,
        *,
        again: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._sleep = sleep
        self._life = contextlib.ExitStack()
        self.tally = Tally()
        with contextlib.ExitStack() as opening:
            self._sent = {
                (spool.path, address): opening.enter_context(
                    contextlib.closing(Sent(spool.path, address))
                )
                for spool in spools
                for address in {transport.address(signal) for signal in signals}
            }
            self._life = opening.pop_all()
        wanted = [each for each in in_order(spools) if each[1].signal in signals]
        before = [each for each in wanted if each[1] in self._memory(*each)]
        self.sent_before = len(before)
        known = set() if again else {entry.path for _, entry in before}
        self.waiting = [each for each in wanted if each[1].path not in known]

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._life.close()

    def _memory(self, path: Path, entry: Entry) -> Sent:
        return self._sent[path, self._transport.address(entry.signal)]

    @property
    def size_bytes(self) -> int:
        """How much there is to send, as it lies on the disk."""
        return sum(entry.size_bytes for _, entry in self.waiting)

    @property
    def oldest_s(self) -> int:
        """When the oldest value of what there is to send was measured; 0: there is none."""
        metrics = (entry.oldest_s for _, entry in self.waiting if entry.signal == "metrics")
        return min(filter(None, metrics), default=0)

    def send(self) -> Iterator[Tally]:
        """Send one request after the other; what became of them so far, after each."""
        for path, entry in self.waiting:
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
        outcome = self._attempted(entry.signal, body)
        if outcome.kind == "retry":
            tally.given_up[entry.signal] = outcome.why
            tally.left[entry.signal] += 1
        elif outcome.kind == "refused":
            # Not remembered: with another configuration there it may be taken.
            tally.refused_points[outcome.why] += entry.points
        else:
            self._memory(path, entry).add(entry)
            tally.requests += 1
            tally.points += entry.points
            tally.rejected_points += outcome.rejected

    def _attempted(self, signal: Signal, body: bytes) -> Outcome:
        outcome = self._transport.send(signal, body)
        for pause_s in PAUSES_S:
            # Where nothing was taken yet, the address is more likely wrong than the collector busy.
            if outcome.kind != "retry" or not self.tally.requests:
                break
            self._sleep(max(pause_s, min(outcome.retry_after_s or 0.0, _LONGEST_WISH_S)))
            outcome = self._transport.send(signal, body)
        return outcome
