"""Sends requests to the collector in order, on threads of its own.

Each signal has a queue and a thread of its own, because each may have its own endpoint: a trace
backend that is down or does not answer delays no metrics. In a queue everything on disk is older
than everything in memory. Only the oldest request of a signal is ever being sent, so the requests
of a signal arrive in their order.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from otel_ddp import errors
from otel_ddp.agent.export.otlp.messages import Piece, halves
from otel_ddp.agent.export.otlp.outcome import (
    RETRY_AFTER_LIMIT_S,
    SIGNALS,
    Outcome,
    Request,
    Signal,
)
from otel_ddp.agent.export.queues import (
    Batch,
    Head,
    QueuedRequest,
    Queues,
    SignalQueue,
)
from otel_ddp.agent.export.report import DeliveryReport, DeliveryStatus, human_size
from otel_ddp.agent.export.spool import Entry, Store
from otel_ddp.agent.kept_thread import KeptThread

MEMORY_LIMIT_BYTES = 32 * 1024 * 1024
# How long one request waits where the receiver may fail over it. Then the next ones get their turn.
PATIENCE_S = 900.0
# A size that was refused is remembered for so long, unless it is smaller than any real limit.
_TOO_LARGE_FOR_S = 600.0
_SMALLEST_LIMIT_BYTES = 64 * 1024


class Sender(Protocol):
    """The part of Transport that the delivery uses."""

    @property
    def destination(self) -> str: ...

    def send(self, signal: Signal, body: bytes) -> Outcome: ...


class Delivery:
    """Sends on threads of its own; the module's docstring tells the order.

    Without a transport nothing is sent: every request goes to disk and stays there.
    """

    def __init__(
        self,
        transport: Sender | None,
        spool: Store,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        backoff_s: tuple[float, float] = (1.0, 30.0),
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        patience_s: float = PATIENCE_S,
        lost_before: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """*lost_before*: points that were lost before they were submitted, by reason."""
        self._transport = transport
        self._spool = spool
        self._clock = clock
        self._jitter = jitter
        self._backoff_s = backoff_s
        self._patience_s = patience_s
        self._lost_before = lost_before

        # One lock for all that follows. It is held over small writes to disk, never over the
        # network and never while a caller's `on_settled` runs.
        self._changed = threading.Condition()
        self._report = DeliveryReport(
            lambda: transport.destination if transport else "nowhere",
            self._describe_backlog,
            lambda: spool.problem,
            clock,
            wall,
        )
        self._queues = Queues(spool, memory_limit_bytes, self._report.add_lost)
        self._stopping = False
        self._lanes = {signal: KeptThread(signal, partial(self._run, signal)) for signal in SIGNALS}
        # Held while an `on_settled` runs, so that they run one by one and in their order.
        self._settling = threading.RLock()

    # ------------------------------------------------------------------ start and stop

    def start(self) -> None:
        """Begin to send, first of all what an earlier process left on disk."""
        if self._transport is not None:
            for lane in self._lanes.values():
                lane.keep_running()

    def threads(self) -> list[KeptThread]:
        """The thread of each signal."""
        return [] if self._transport is None else list(self._lanes.values())

    def stop(self, timeout_s: float) -> bool:
        """Put everything on disk and end; False where something could not be kept.

        A request that is being sent may end within the timeout; it is on disk as well.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        kept = self.move_to_disk()
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.join(max(deadline - time.monotonic(), 0.0))
        # Once more, for what came back undelivered from its last attempt.
        return self.move_to_disk() and kept

    # ------------------------------------------------------------------ called by the agent

    def submit(
        self, requests: Sequence[Request], on_settled: Callable[[], None] | None = None
    ) -> None:
        """Queue requests; `on_settled` is called once none of them depends on this process.

        That is: each was delivered, was dropped and counted, or is on disk. The same holds for
        everything submitted before, unless neither the collector nor the disk accepts that.
        """
        with self._changed:
            self._queues.add(requests, on_settled)
            for queue in self._queues:
                if queue.requests and self._goes_to_disk(queue):
                    self._queues.move_to_disk(queue)
            self._queues.enforce_memory_limit()
            self._say_losses()
            self._changed.notify_all()
        self._call_settled()

    def _goes_to_disk(self, queue: SignalQueue) -> bool:
        """Whether new requests of this signal go to disk at once."""
        # Behind requests on disk there is no hurry, and a crash would lose less.
        waits = queue.failures or self._spool.oldest(queue.signal)
        return self._transport is None or bool(waits or self._lanes[queue.signal].problem)

    def move_to_disk(self) -> bool:
        """Put every undelivered request on disk now, without waiting for the network.

        A training process waits for this before it ends. False where the disk did not accept
        all of it; the rest stays in memory and is still sent.
        """
        with self._changed:
            moved = self._queues.move_all_to_disk()
            self._say_losses()
        self._call_settled()
        return moved

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that can be delivered is; False where the time was too short."""
        if self._transport is None:
            return self.move_to_disk()
        with self._changed:
            for queue in self._queues:
                # The last chance: a signal that pauses after a failure is tried now.
                queue.not_before = 0.0
                queue.failures = 0
            self._changed.notify_all()
            return self._changed.wait_for(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return not any(
            queue.busy
            or queue.requests
            or (not queue.failures and self._spool.oldest(queue.signal))
            for queue in self._queues
        )

    def failures(self, signal: Signal) -> int:
        """How many attempts of this signal have failed since the last success."""
        with self._changed:
            return self._queues[signal].failures

    def status(self) -> DeliveryStatus:
        """How the delivery goes at this moment."""
        with self._changed:
            return self._report.status(
                lost=self._spool.dropped_points,
                memory_bytes=self._queues.memory_bytes,
                spool_bytes=self._spool.size_bytes,
            )

    # ------------------------------------------------------------------ the threads

    def _run(self, signal: Signal) -> None:
        queue = self._queues[signal]
        while True:
            wait_s = self.send_next(signal)
            with self._changed:
                if self._stopping:
                    return
                # Asked again under the lock: a request may have been submitted meanwhile.
                if wait_s != 0.0 and (wait_s := self._due_in_s(queue)) != 0.0:
                    self._changed.wait(wait_s)

    def send_next(self, signal: Signal) -> float | None:
        """Send one request of a signal if one is due; the seconds until one is, or None."""
        transport, queue = self._transport, self._queues[signal]
        if transport is None:
            return None
        with self._changed:
            wait_s = self._due_in_s(queue)
            if wait_s != 0.0 or self._stopping:
                return wait_s
            head = self._head(queue)
            if head is None:
                self._say_losses()
                return 0.0
            queue.busy = True
            queue.in_flight = head.queued
        try:
            outcome, parts = self._attempt(transport, queue, head)
        except errors.ANY_ERROR:
            # The thread ends, and is started again: the request is still there.
            with self._changed:
                queue.busy, queue.in_flight = False, None
            raise
        with self._changed:
            queue.busy, queue.in_flight = False, None
            if parts:
                self._split(queue, head, parts, outcome)
            elif outcome is not None:
                self._finish_attempt(queue, head, outcome)
            self._say_losses()
            self._changed.notify_all()
        self._call_settled()
        return 0.0

    def _attempt(
        self, transport: Sender, queue: SignalQueue, head: Head
    ) -> tuple[Outcome | None, list[Piece]]:
        """Send a part; its outcome, and smaller parts of it that are to be sent in its place.

        Without the lock: what it changes is used by the thread of this signal alone.
        """
        now, piece = self._clock(), head.left[0]
        if now >= queue.too_large_until:
            queue.too_large_bytes, queue.smaller_delivered = math.inf, False
        if len(piece.body) >= queue.too_large_bytes and (parts := _halves(queue.signal, piece)):
            return None, parts
        outcome = _send(transport, queue.signal, piece.body)
        parts = _halves(queue.signal, piece) if outcome.too_large else []
        unsure = outcome.doubtful or (
            outcome.too_large and not (parts or head.delivered or queue.smaller_delivered)
        )
        if not unsure:
            head.doubted_since = None
        elif head.doubted_since is None:
            head.doubted_since = now
        if head.doubted_since is not None:
            waits = now - head.doubted_since < self._patience_s
            outcome = replace(outcome, kind="retry" if waits else "refused")
        return outcome, parts

    def _split(
        self, queue: SignalQueue, head: Head, parts: list[Piece], outcome: Outcome | None
    ) -> None:
        """Send the parts in place of what was too large: all of it is to arrive, in its order."""
        size_bytes = len(head.left.popleft().body)
        head.left.extendleft(reversed(parts))
        if outcome is not None and size_bytes >= _SMALLEST_LIMIT_BYTES:
            queue.too_large_bytes = min(size_bytes, queue.too_large_bytes)
            queue.too_large_until = self._clock() + _TOO_LARGE_FOR_S

    def _due_in_s(self, queue: SignalQueue) -> float | None:
        """In how many seconds its oldest request may be sent; None if nothing waits."""
        if not (queue.requests or self._spool.oldest(queue.signal)):
            return None
        return max(queue.not_before - self._clock(), 0.0)

    def _head(self, queue: SignalQueue) -> Head | None:
        """What is to be sent of a signal's oldest request; None if that cannot be read now."""
        head, entry = queue.head, self._spool.oldest(queue.signal)
        if head is None or not _is_oldest(head.queued, entry, queue):
            queued = self._oldest(queue)
            if queued is None:
                return None
            whole = Piece(queued.request.body, queued.request.points)
            head = queue.head = Head(queued, deque([whole]))
        if head.queued.entry is not None:
            self._spool.protect(head.queued.entry)
        return head

    def _oldest(self, queue: SignalQueue) -> QueuedRequest | None:
        """The oldest request of a signal, from disk or from memory."""
        entry = self._spool.oldest(queue.signal)
        if entry is None:
            return queue.requests[0] if queue.requests else None
        try:
            body = entry.read()
        except OSError as error:
            # Too many open files, or a file server that is away: the file can be read later.
            why = f"{entry.path} cannot be read: {error.strerror or error}"
            self._postpone(queue, entry.points, Outcome("retry", why))
            return None
        if body is None:
            self._spool.remove(entry, "corrupt")
            return None
        request = Request(queue.signal, body, entry.points)
        return QueuedRequest(-1, request, Batch(0, None), entry)

    def _finish_attempt(self, queue: SignalQueue, head: Head, outcome: Outcome) -> None:
        piece = head.left[0]
        if outcome.kind == "retry":
            if outcome.too_large:
                # If another part of it gets through, this one is too large indeed.
                head.left.rotate(-1)
            if head.queued.entry is not None:
                self._spool.unprotect(head.queued.entry)
            self._postpone(queue, piece.points, outcome)
            return
        head.left.popleft()
        if outcome.kind == "delivered":
            head.delivered = queue.smaller_delivered = True
        head.refused = head.refused or outcome.kind == "refused"
        self._report.add_outcome(queue.signal, piece.points, outcome)
        # The collector answers, so the next request need not wait.
        queue.failures, queue.not_before = 0, 0.0
        if not head.left:
            queue.head = None
            self._queues.remove_sent(queue, head.queued, "refused" if head.refused else "delivered")

    def _postpone(self, queue: SignalQueue, points: int, outcome: Outcome) -> None:
        queue.failures += 1
        queue.not_before = self._clock() + self._pause_s(queue.failures, outcome)
        self._queues.move_to_disk(queue)
        self._queues.enforce_memory_limit()
        # After the move: the report tells where the requests wait.
        self._report.add_outcome(queue.signal, points, outcome)

    def _pause_s(self, failures: int, outcome: Outcome) -> float:
        shortest_s, longest_s = self._backoff_s
        pause_s = min(shortest_s * 2.0 ** min(failures - 1, 30), longest_s)
        pause_s *= 0.5 + self._jitter()
        if outcome.retry_after_s is None:
            return pause_s
        # Not before the collector asked for, and not all nodes in the same moment after it.
        asked_s = min(outcome.retry_after_s, RETRY_AFTER_LIMIT_S) * (1.0 + 0.5 * self._jitter())
        return max(pause_s, asked_s)

    def _call_settled(self) -> None:
        """Called without the lock: an `on_settled` may submit the next batch."""
        with self._settling:
            while (batch := self._pop_settled()) is not None:
                if batch.on_settled is not None:
                    _call(batch.on_settled)

    def _pop_settled(self) -> Batch | None:
        with self._changed:
            return self._queues.pop_settled()

    def _say_losses(self) -> None:
        lost = {**self._spool.dropped_points, **self._lost_before()}
        self._report.poll_losses(lost, self._spool.has_room)

    def _describe_backlog(self) -> str:
        parts = []
        if self._spool.entries:
            parts.append(f"{human_size(self._spool.size_bytes)} wait on disk")
        if self._queues.memory_bytes:
            parts.append(f"{human_size(self._queues.memory_bytes)} wait in memory")
        if self._spool.problem:
            parts.append(f"the disk does not take it ({self._spool.problem})")
        return ", ".join(parts) or "nothing waits"


def _is_oldest(queued: QueuedRequest, entry: Entry | None, queue: SignalQueue) -> bool:
    """Whether a request is still the oldest of its signal."""
    if entry is not None or queued.entry is not None:
        return queued.entry is entry
    return bool(queue.requests) and queue.requests[0] is queued


@errors.contained(default=Outcome("retry", "sending failed: the agent's log says how"))
def _send(transport: Sender, signal: Signal, body: bytes) -> Outcome:
    try:
        return transport.send(signal, body)
    except MemoryError:
        # No fault of the request or of ours: another moment may be better, more memory will be.
        return Outcome("retry", "the agent has no memory left to send (MemoryError)")


def _halves(signal: Signal, piece: Piece) -> list[Piece]:
    return halves(signal, piece.body) if piece.points > 1 else []


@errors.contained()
def _call(on_settled: Callable[[], None]) -> None:
    on_settled()
