"""Sends requests to the collector in order, on threads of its own.

Each signal has a lane and a thread of its own, because each may have its own endpoint: a trace
backend that is down or does not answer delays no metrics. In a lane everything on disk is older
than everything in memory. Only the oldest request of a signal is ever being sent, so the requests
of a signal arrive in their order.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from otel_ddp import errors
from otel_ddp.agent.export.otlp import RETRY_AFTER_LIMIT_S, SIGNALS, Outcome, Request, Signal
from otel_ddp.agent.export.otlp.messages import Piece, halves
from otel_ddp.agent.export.report import DeliveryReport, DeliveryStatus, human_size
from otel_ddp.agent.export.spool import Entries, Entry
from otel_ddp.agent.kept_thread import KeptThread

MEMORY_LIMIT_BYTES = 32 * 1024 * 1024
# How long one request waits where the receiver may fail over it. Then the next ones get their turn.
PATIENCE_S = 900.0


class Sender(Protocol):
    """The part of Transport that the delivery uses."""

    @property
    def destination(self) -> str: ...

    def send(self, signal: Signal, body: bytes) -> Outcome: ...


@dataclass(eq=False)
class _Batch:
    """The requests of one submit, and whom to call once all of them are safe."""

    pending: int
    on_settled: Callable[[], None] | None
    blocked: bool = False
    """Neither the collector nor the disk accepts a part of it: later batches do not wait."""


@dataclass(eq=False)
class _Queued:
    """A request on its way, from memory or from disk."""

    request: Request
    batch: _Batch
    entry: Entry | None = None
    """Its copy on disk, if it has one; its batch no longer counts it then."""
    parts: deque[Piece] = field(default_factory=deque)
    """What is still to be sent of it, once it is being sent."""
    refused: bool = False
    """Whether a part of it was refused."""
    doubted_since: float | None = None
    """Since when answers may be about it, or about the way to the receiver."""


@dataclass(eq=False)
class _Lane:
    """One signal: what waits in memory, and how sending goes."""

    signal: Signal
    thread: KeptThread
    memory: deque[_Queued] = field(default_factory=deque)
    head: _Queued | None = None
    """The request that was tried last."""
    busy: bool = False
    """Whether it is being sent at this moment."""
    failures: int = 0
    not_before: float = 0.0


class Delivery:
    """Sends on threads of its own; the module's docstring tells the order.

    Without a transport nothing is sent: every request goes to disk and stays there.
    """

    def __init__(
        self,
        transport: Sender | None,
        spool: Entries,
        clock: Callable[[], float] = time.monotonic,
        *,
        jitter: Callable[[], float] = random.random,
        backoff_s: tuple[float, float] = (1.0, 30.0),
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._transport = transport
        self._spool = spool
        self._clock = clock
        self._jitter = jitter
        self._backoff_s = backoff_s
        self._memory_limit_bytes = memory_limit_bytes
        self._patience_s = patience_s

        # One lock for all that follows, and for the spool. It is held over small writes to disk,
        # never over the network and never while a caller's `on_settled` runs.
        self._changed = threading.Condition()
        self._report = DeliveryReport(
            None if transport is None else transport.destination,
            *(self._describe_backlog, clock),
        )
        self._lanes = {
            signal: _Lane(signal, KeptThread(signal, partial(self._run, signal)))
            for signal in SIGNALS
        }
        self._batches: list[_Batch] = []
        self._memory_bytes = 0
        self._stopping = False
        # Held while an `on_settled` runs, so that they run one by one and in their order.
        self._settling = threading.RLock()

    # ------------------------------------------------------------------ start and stop

    def start(self) -> None:
        """Begin to send, first of all what an earlier process left on disk."""
        for thread in self.threads():
            thread.keep_running()

    def threads(self) -> list[KeptThread]:
        """The thread of each signal."""
        return [] if self._transport is None else [each.thread for each in self._lanes.values()]

    def stop(self, timeout_s: float) -> bool:
        """Put everything on disk and end; False where something could not be kept.

        A request that is being sent may end within the timeout; it is on disk as well.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        kept = self.move_to_disk()
        deadline = time.monotonic() + timeout_s
        for thread in self.threads():
            thread.join(max(deadline - time.monotonic(), 0.0))
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
            batch = _Batch(len(requests), on_settled)
            self._batches.append(batch)
            for request in requests:
                self._lanes[request.signal].memory.append(_Queued(request, batch))
                self._memory_bytes += len(request.body)
            for lane in self._lanes.values():
                if self._goes_to_disk(lane):
                    self._move_or_block(lane)
            self._enforce_memory_limit()
            self._say_losses()
            self._changed.notify_all()
        self._call_settled()

    def _goes_to_disk(self, lane: _Lane) -> bool:
        """Whether new requests of this signal go to disk at once."""
        # Behind requests on disk there is no hurry, and a crash would lose less.
        waits = lane.failures or self._spool.oldest(lane.signal)
        return self._transport is None or bool(waits or lane.thread.problem)

    def move_to_disk(self) -> bool:
        """Put every undelivered request on disk now, without waiting for the network.

        A training process waits for this before it ends. False where the disk did not accept
        all of it; the rest stays in memory and is still sent.
        """
        with self._changed:
            moved = self._move_all()
            self._say_losses()
        self._call_settled()
        return moved

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that can be delivered is; False where the time was too short."""
        if self._transport is None:
            return self.move_to_disk()
        with self._changed:
            for lane in self._lanes.values():
                # The last chance: a signal that pauses after a failure is tried now.
                lane.not_before, lane.failures = 0.0, 0
            self._changed.notify_all()
            return self._changed.wait_for(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return not any(
            lane.busy or lane.memory or (not lane.failures and self._spool.oldest(lane.signal))
            for lane in self._lanes.values()
        )

    def failures(self, signal: Signal) -> int:
        """How many attempts of this signal have failed since the last success."""
        return self._lanes[signal].failures

    def status(self) -> DeliveryStatus:
        """How the delivery goes at this moment."""
        with self._changed:
            return self._report.status(
                lost=self._spool.dropped,
                memory_bytes=self._memory_bytes,
                spool_bytes=self._spool.size_bytes,
            )

    # ------------------------------------------------------------------ the threads

    def _run(self, signal: Signal) -> None:
        lane = self._lanes[signal]
        while True:
            wait_s = self.send_next(signal)
            with self._changed:
                if self._stopping:
                    return
                # Asked again under the lock: a request may have been submitted meanwhile.
                if wait_s != 0.0 and (wait_s := self._due_in_s(lane)) != 0.0:
                    self._changed.wait(wait_s)

    def send_next(self, signal: Signal) -> float | None:
        """Send one request of a signal if one is due; the seconds until one is, or None."""
        transport, lane = self._transport, self._lanes[signal]
        if transport is None:
            return None
        with self._changed:
            wait_s = self._due_in_s(lane)
            if wait_s != 0.0 or self._stopping:
                return wait_s
            head = lane.head = self._oldest(lane)
            if head is None:
                self._say_losses()
                return 0.0
            lane.busy = True
        try:
            outcome = _send(transport, signal, head.parts[0].body)
            piece = head.parts[0]
            smaller = []
            if outcome.too_large and piece.points > 1:
                smaller = halves(signal, piece.body)
        finally:
            # Where an error ends the thread it is started again: the request is still there.
            with self._changed:
                lane.busy = False
        with self._changed:
            if smaller:
                # In place of what was too large: all of it is to arrive, in its order.
                head.parts.popleft()
                head.parts.extendleft(reversed(smaller))
            else:
                self._finish_attempt(lane, head, self._decided(head, outcome))
            self._say_losses()
            self._changed.notify_all()
        self._call_settled()
        return 0.0

    def _due_in_s(self, lane: _Lane) -> float | None:
        """In how many seconds its oldest request may be sent; None if nothing waits."""
        if not (lane.memory or self._spool.oldest(lane.signal)):
            return None
        return max(lane.not_before - self._clock(), 0.0)

    def _oldest(self, lane: _Lane) -> _Queued | None:
        """The oldest request of a signal, from disk or from memory; None: not to be read now."""
        head, entry = lane.head, self._spool.oldest(lane.signal)
        if head is not None and head.entry is entry and (entry or head is lane.memory[0]):
            return head
        if entry is None:
            found = lane.memory[0]
        else:
            body = self._read(lane, entry)
            if body is None:
                return None
            request = Request(lane.signal, body, entry.points)
            found = _Queued(request, _Batch(0, None), entry)
        found.parts.append(Piece(found.request.body, found.request.points))
        return found

    def _read(self, lane: _Lane, entry: Entry) -> bytes | None:
        try:
            body = entry.read()
        except FileNotFoundError:
            # Another program has removed it.
            self._spool.remove(entry, "spool_error")
        except OSError as error:
            # Too many open files, or a file server that is away: the file can be read later.
            why = f"{entry.path} cannot be read: {error.strerror or error}"
            self._postpone(lane, entry.points, Outcome("retry", why))
        else:
            if body is None:
                self._spool.remove(entry, "corrupt")
            return body
        return None

    def _decided(self, head: _Queued, outcome: Outcome) -> Outcome:
        """An outcome that may be about this request, or about the way, is taken for one of them."""
        if not outcome.doubtful:
            head.doubted_since = None
            return outcome
        now = self._clock()
        if head.doubted_since is None:
            head.doubted_since = now
        waits = now - head.doubted_since < self._patience_s
        return replace(outcome, kind="retry" if waits else "refused")

    def _finish_attempt(self, lane: _Lane, head: _Queued, outcome: Outcome) -> None:
        points = head.parts[0].points
        if outcome.kind == "retry":
            self._postpone(lane, points, outcome)
            return
        head.parts.popleft()
        head.refused = head.refused or outcome.kind == "refused"
        self._report.add_outcome(lane.signal, points, outcome)
        # The collector answers, so the next request need not wait.
        lane.failures, lane.not_before = 0, 0.0
        if head.parts:
            return
        lane.head = None
        if head.entry is not None:
            self._spool.remove(head.entry, "refused" if head.refused else "delivered")
        if head in lane.memory:
            self._forget(lane, head)

    def _postpone(self, lane: _Lane, points: int, outcome: Outcome) -> None:
        lane.failures += 1
        lane.not_before = self._clock() + self._pause_s(lane.failures, outcome)
        self._move_or_block(lane)
        self._enforce_memory_limit()
        # After the move: the report tells where the requests wait.
        self._report.add_outcome(lane.signal, points, outcome)

    def _pause_s(self, failures: int, outcome: Outcome) -> float:
        shortest_s, longest_s = self._backoff_s
        pause_s = min(shortest_s * 2.0 ** min(failures - 1, 30), longest_s)
        pause_s *= 0.5 + self._jitter()
        if outcome.retry_after_s is None:
            return pause_s
        # Not before the collector asked for, and not all nodes in the same moment after it.
        asked_s = min(outcome.retry_after_s, RETRY_AFTER_LIMIT_S) * (1.0 + 0.5 * self._jitter())
        return max(pause_s, asked_s)

    # ------------------------------------------------------------------ memory and disk

    def _move_all(self) -> bool:
        # Every signal is tried: the disk may be full for one and not for the next.
        moved = [self._move_lane(lane) for lane in self._lanes.values()]
        return all(moved)

    def _move_or_block(self, lane: _Lane) -> None:
        """Move a lane to disk; what the disk does not accept delays no later batch."""
        if not self._move_lane(lane):
            for queued in lane.memory:
                queued.batch.blocked = True

    def _move_lane(self, lane: _Lane) -> bool:
        """Oldest first; stops at the first request that the disk does not accept."""
        while lane.memory:
            queued = lane.memory[0]
            # If it is being sent and arrives after all, its copy is removed.
            queued.entry = self._spool.append(queued.request)
            if queued.entry is None:
                return False
            self._forget(lane, queued)
        return True

    def _enforce_memory_limit(self) -> None:
        """Drop requests where neither network nor disk accepts them: current values first."""
        if self._memory_bytes <= self._memory_limit_bytes:
            return
        self._move_all()
        waiting = [
            (lane, queued)
            for lane in self._lanes.values()
            for queued in lane.memory
            if not (lane.busy and queued is lane.head)
        ]
        waiting.sort(key=lambda each: (each[1].request.irreplaceable, each[1].request.oldest_s))
        for lane, queued in waiting:
            if self._memory_bytes <= self._memory_limit_bytes:
                return
            self._forget(lane, queued)
            self._report.lost["memory_full"] += queued.request.points

    def _forget(self, lane: _Lane, queued: _Queued) -> None:
        """It is in memory no more."""
        lane.memory.remove(queued)
        self._memory_bytes -= len(queued.request.body)
        queued.batch.pending -= 1

    # ------------------------------------------------------------------ who is told

    def _call_settled(self) -> None:
        """Called without the lock: an `on_settled` may submit the next batch."""
        with self._settling:
            while (batch := self._pop_settled()) is not None:
                if batch.on_settled is not None:
                    _call(batch.on_settled)

    def _pop_settled(self) -> _Batch | None:
        """The next batch of which nothing is pending; batches settle in their order."""
        with self._changed:
            for batch in self._batches:
                if not batch.pending:
                    self._batches.remove(batch)
                    return batch
                if not batch.blocked:
                    break
        return None

    def _say_losses(self) -> None:
        self._report.poll_losses(self._spool.dropped)

    def _describe_backlog(self) -> str:
        parts = []
        if self._spool.size_bytes:
            parts.append(f"{human_size(self._spool.size_bytes)} wait on disk")
        if self._memory_bytes:
            parts.append(f"{human_size(self._memory_bytes)} wait in memory")
        if self._spool.problem:
            parts.append(f"the disk does not take it ({self._spool.problem})")
        return ", ".join(parts) or "nothing waits"


@errors.contained(default=Outcome("retry", "sending failed: the agent's log says how"))
def _send(transport: Sender, signal: Signal, body: bytes) -> Outcome:
    return transport.send(signal, body)


@errors.contained()
def _call(on_settled: Callable[[], None]) -> None:
    on_settled()
