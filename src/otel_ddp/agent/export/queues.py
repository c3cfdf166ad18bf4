"""Holds the requests of each signal in order, in memory or on disk, until they are delivered."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from otel_ddp.agent.export.otlp.messages import Piece
from otel_ddp.agent.export.otlp.outcome import SIGNALS, Request, Signal
from otel_ddp.agent.export.spool import Entry, Store, Why


@dataclass(eq=False)
class Batch:
    """The requests of one submit, and whom to call once all of them are safe."""

    pending: int
    on_settled: Callable[[], None] | None
    blocked: bool = False
    """Neither the collector nor the disk accepts a part of it: later batches do not wait."""


@dataclass(eq=False)
class QueuedRequest:
    """A request on its way, from memory or from disk."""

    number: int
    request: Request
    batch: Batch
    entry: Entry | None = None
    """Its copy on disk, if it has one; its batch no longer counts it then."""


@dataclass(eq=False)
class Head:
    """The oldest request of a signal, and the parts of it that are still to be sent."""

    queued: QueuedRequest
    left: deque[Piece]
    delivered: bool = False
    """Whether a part of it was delivered."""
    refused: bool = False
    """Whether a part of it was refused."""
    doubted_since: float | None = None
    """Since when it is answered in a way that may be about it, or about the way to the receiver."""


@dataclass
class SignalQueue:
    """The requests of one signal that are in memory, and how sending that signal goes."""

    signal: Signal
    requests: deque[QueuedRequest] = field(default_factory=deque)
    failures: int = 0
    not_before: float = 0.0
    busy: bool = False
    in_flight: QueuedRequest | None = None
    head: Head | None = None
    too_large_bytes: float = math.inf
    """A request of this size was refused for its size."""
    too_large_until: float = 0.0
    smaller_delivered: bool = False
    """Whether a smaller one was delivered since."""


class Queues:
    """The queues of all signals over one spool.

    Not locked: the delivery calls it under its own lock. Without a lock over several signals
    neither the memory limit nor the order of batches could be kept.
    """

    def __init__(
        self, spool: Store, memory_limit_bytes: int, add_lost: Callable[[str, int], None]
    ) -> None:
        self._spool = spool
        self._memory_limit_bytes = memory_limit_bytes
        self._add_lost = add_lost
        self._by_signal = {signal: SignalQueue(signal) for signal in SIGNALS}
        self._numbers = itertools.count()
        self._batches: list[Batch] = []
        self.memory_bytes = 0

    def __getitem__(self, signal: Signal) -> SignalQueue:
        return self._by_signal[signal]

    def __iter__(self) -> Iterator[SignalQueue]:
        return iter(self._by_signal.values())

    def add(
        self, requests: Sequence[Request], on_settled: Callable[[], None] | None = None
    ) -> None:
        """Put requests behind all others of their signal, in memory."""
        batch = Batch(len(requests), on_settled)
        self._batches.append(batch)
        for request in requests:
            queued = QueuedRequest(next(self._numbers), request, batch)
            self._by_signal[request.signal].requests.append(queued)
            self.memory_bytes += len(request.body)

    def remove_sent(self, queue: SignalQueue, queued: QueuedRequest, why: Why) -> None:
        """Forget a request that is done with."""
        if queued.entry is not None:
            self._spool.remove(queued.entry, why)
        if queue.requests and queue.requests[0] is queued:
            self._pop_first(queue)

    def pop_settled(self) -> Batch | None:
        """The next batch of which nothing is pending; batches settle in their order."""
        for batch in self._batches:
            if not batch.pending:
                self._batches.remove(batch)
                return batch
            if not batch.blocked:
                return None
        return None

    # -- to disk

    def move_all_to_disk(self) -> bool:
        """Move everything in memory to disk; False where the disk did not accept all of it."""
        # Every signal is tried: the disk may be full for one and not for the next.
        moved = [self._move_to_disk(queue) for queue in self]
        return all(moved)

    def move_to_disk(self, queue: SignalQueue) -> None:
        """Move a queue to disk; what the disk does not accept delays no later batch."""
        if not self._move_to_disk(queue):
            for queued in queue.requests:
                queued.batch.blocked = True

    def enforce_memory_limit(self) -> None:
        """Drop requests where neither network nor disk accepts them: current values first."""
        if self._fits():
            return
        self.move_all_to_disk()
        for queue in self:
            for queued in list(self._idle(queue, irreplaceable=False)):
                if not self._fits():
                    self._drop(queue, queued, "memory_full")
        while not self._fits():
            firsts = [
                (first.number, queue, first)
                for queue in self
                if (first := next(self._idle(queue, irreplaceable=True), None))
            ]
            if not firsts:
                return
            _, queue, oldest = min(firsts, key=lambda each: each[0])
            self._drop(queue, oldest, "memory_full")

    def _fits(self) -> bool:
        return self.memory_bytes <= self._memory_limit_bytes

    def _move_to_disk(self, queue: SignalQueue) -> bool:
        """Oldest first; stops at the first request that the disk does not accept."""
        while queue.requests:
            queued = queue.requests[0]
            if queued.entry is None:
                queued.entry = self._spool.append(queued.request)
                if queued.entry is None:
                    return False
                if queued is queue.in_flight:
                    # If it arrives after all, its copy is removed; if not, it is on disk.
                    self._spool.protect(queued.entry)
            self._pop_first(queue)
        return True

    def _idle(self, queue: SignalQueue, irreplaceable: bool) -> Iterator[QueuedRequest]:
        """The requests in memory that are not being sent, oldest first."""
        return (
            each
            for each in queue.requests
            if each.request.irreplaceable is irreplaceable and each is not queue.in_flight
        )

    def _pop_first(self, queue: SignalQueue) -> None:
        queued = queue.requests.popleft()
        self.memory_bytes -= len(queued.request.body)
        queued.batch.pending -= 1

    def _drop(self, queue: SignalQueue, queued: QueuedRequest, why: str) -> None:
        queue.requests.remove(queued)
        self.memory_bytes -= len(queued.request.body)
        queued.batch.pending -= 1
        self._add_lost(why, queued.request.points)
