"""Brings requests to the collector in order, without ever holding up who hands them in.

Each signal has a lane and a thread of its own, because each may have an endpoint of its own: a
trace backend that is down, or does not answer, holds up no metrics. In a lane everything on disk is
older than everything in memory, and only the oldest request is ever under way, so a lane's requests
arrive in their order.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from otel_ddp.agent.export.delivery_report import Facts, Report
from otel_ddp.agent.export.otlp.outcome import SIGNALS, Outcome, Signal
from otel_ddp.agent.export.spool import Entry, Spool
from otel_ddp.containment import contained

MEMORY_LIMIT_BYTES = 32 * 1024 * 1024
LONGEST_WISH_S = 60.0


class Sender(Protocol):
    """What a Transport is to us."""

    @property
    def destination(self) -> str: ...

    def send(self, signal: Signal, body: bytes) -> Outcome: ...


@dataclass(frozen=True)
class Request:
    """One OTLP request, ready to go."""

    signal: Signal
    body: bytes
    points: int
    lasting: bool = True
    """Whether it holds what is not sent again: logged values, spans, events. False where all of it
    is how series stand: the next export tells that anew, so it goes first where room is short."""
    oldest_s: int = 0
    """When the oldest point in it was measured, in seconds; 0: not known."""


@dataclass(eq=False)
class _Batch:
    waiting: int
    settled: Callable[[], None] | None
    stuck: bool = False
    """Neither the collector nor the disk takes a part of it: those behind do not wait for it."""


@dataclass(eq=False)
class _Item:
    number: int
    request: Request
    batch: _Batch
    entry: Entry | None = None
    """Its copy on disk, where it has one; then it is settled."""


@dataclass
class _Lane:
    signal: Signal
    queue: deque[_Item] = field(default_factory=deque)
    failures: int = 0
    not_before: float = 0.0
    busy: bool = False
    in_flight: _Item | None = None


class Delivery:
    """Sends on threads of its own; see the module for the order.

    Without a transport it sends nothing: all that is handed in goes to disk, and stays there.
    """

    def __init__(
        self,
        transport: Sender | None,
        spool: Spool,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        backoff_s: tuple[float, float] = (1.0, 30.0),
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self._transport = transport
        self._spool = spool
        self._clock = clock
        self._jitter = jitter
        self._backoff_s = backoff_s
        self._memory_limit_bytes = memory_limit_bytes

        # One lock for all that follows. It is held over small writes to disk, never over the
        # network and never while a caller's `settled` runs.
        self._changed = threading.Condition()
        self._lanes = {signal: _Lane(signal) for signal in SIGNALS}
        self._memory_bytes = 0
        self._numbers = itertools.count()
        self._batches: list[_Batch] = []
        self._stopping = False
        self._threads: list[threading.Thread] = []
        # Held while a `settled` runs, so that they run one by one and in their order.
        self._settling = threading.RLock()

        self._report = Report(
            lambda: transport.destination if transport else "nowhere",
            self._where_it_waits,
            lambda: spool.problem,
            clock,
            wall,
        )

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to send, with what an earlier process left on disk."""
        if self._transport is None:
            return
        for signal in SIGNALS:
            name = f"otel-ddp-{signal}"
            thread = threading.Thread(target=self._run, args=(signal,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Put what waits on disk and end; False where something could not be kept.

        A request that is under way may end within the timeout; it is on disk as well.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        kept = self.take_over()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        # What came back undelivered from its last attempt.
        return self.take_over() and kept

    # ------------------------------------------------------------------ handing in

    def submit(
        self, requests: Sequence[Request], settled: Callable[[], None] | None = None
    ) -> None:
        """Hand requests in; `settled` is called once none of them depends on this process.

        That is: each was delivered, was dropped and counted, or lies on disk; and so was all that
        was handed in before, unless nothing takes that.
        """
        batch = _Batch(len(requests), settled)
        with self._changed:
            self._batches.append(batch)
            for request in requests:
                lane = self._lanes[request.signal]
                lane.queue.append(_Item(next(self._numbers), request, batch))
                self._memory_bytes += len(request.body)
            for lane in self._lanes.values():
                if lane.queue and self._waits(lane):
                    self._put_aside(lane)
            self._bound_memory()
            self._changed.notify_all()
        self._call_settled()

    def _waits(self, lane: _Lane) -> bool:
        """Whether what is handed in goes to disk at once."""
        # Behind what waits on disk there is no hurry, and a crash would cost less.
        return self._transport is None or bool(lane.failures or self._spool.oldest(lane.signal))

    def take_over(self) -> bool:
        """Put everything that waits or is under way on disk, now, without asking the network.

        For a training process that waits for this before it ends. False where the disk did not
        take all of it; the rest stays in memory and is still tried.
        """
        taken = True
        with self._changed:
            for lane in self._lanes.values():
                # The other lanes are tried as well when the disk is full for one.
                taken = self._to_disk(lane) and taken
        self._call_settled()
        return taken

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that can be delivered is; False where the time did not suffice."""
        if self._transport is None:
            return self.take_over()
        with self._changed:
            for lane in self._lanes.values():
                # The last chance: what waits for its turn after a failure tries now.
                lane.not_before = 0.0
                lane.failures = 0
            self._changed.notify_all()
            return self._changed.wait_for(self._idle, timeout_s)

    def _idle(self) -> bool:
        return not any(
            lane.busy or lane.queue or (not lane.failures and self._spool.oldest(lane.signal))
            for lane in self._lanes.values()
        )

    # ------------------------------------------------------------------ the threads

    def _run(self, signal: Signal) -> None:
        mine = (signal,)
        while True:
            wait_s = self.step(mine)
            with self._changed:
                if self._stopping:
                    return
                # Asked again under the lock: something may have been handed in meanwhile.
                if wait_s != 0.0 and self._next_lane(mine) is None:
                    self._changed.wait(self._until_due(mine))

    def step(self, signals: Sequence[Signal] = SIGNALS) -> float | None:
        """Send one request of these signals if one is due; the seconds until one is, or None."""
        transport = self._transport
        if transport is None:
            return None
        with self._changed:
            lane = None if self._stopping else self._next_lane(signals)
            if lane is None:
                return self._until_due(signals)
            item = self._head(lane)
            lane.busy = True
            lane.in_flight = item
        outcome = None if item is None else _send(transport, item.request)
        with self._changed:
            lane.busy = False
            lane.in_flight = None
            if item is not None and outcome is not None:
                self._came_back(lane, item, outcome)
            self._changed.notify_all()
        self._call_settled()
        return 0.0

    def _next_lane(self, signals: Sequence[Signal]) -> _Lane | None:
        now = self._clock()
        for lane in self._waiting_lanes(signals):
            if lane.not_before <= now:
                return lane
        return None

    def _until_due(self, signals: Sequence[Signal]) -> float | None:
        moments = [lane.not_before for lane in self._waiting_lanes(signals)]
        return max(min(moments) - self._clock(), 0.0) if moments else None

    def _waiting_lanes(self, signals: Sequence[Signal]) -> Iterator[_Lane]:
        lanes = (self._lanes[signal] for signal in signals)
        return (lane for lane in lanes if lane.queue or self._spool.oldest(lane.signal))

    def _head(self, lane: _Lane) -> _Item | None:
        """The oldest request of a lane, from disk or from memory."""
        entry = self._spool.oldest(lane.signal)
        if entry is None:
            return lane.queue[0] if lane.queue else None
        try:
            body = entry.read()
        except OSError as error:
            # Too many open files, a file server that is away: it is as good later as it was.
            why = f"{entry.path} cannot be read: {error.strerror or error}"
            self._put_off(lane, entry.points, Outcome("retry", why))
            return None
        if body is None:
            self._spool.remove(entry, "corrupt")
            return None
        self._spool.keep(entry)
        return _Item(-1, Request(lane.signal, body, entry.points), _Batch(0, None), entry)

    def _came_back(self, lane: _Lane, item: _Item, outcome: Outcome) -> None:
        if outcome.kind == "retry":
            if item.entry is not None:
                self._spool.release(item.entry)
            self._put_off(lane, item.request.points, outcome)
            return
        self._report.note(lane.signal, item.request.points, outcome)
        # It answers, so there is nothing to wait for before the next request.
        lane.failures, lane.not_before = 0, 0.0
        if item.entry is not None:
            self._spool.remove(item.entry)
        if lane.queue and lane.queue[0] is item:
            lane.queue.popleft()
            self._memory_bytes -= len(item.request.body)
            self._settle(item)

    def _put_off(self, lane: _Lane, points: int, outcome: Outcome) -> None:
        lane.failures += 1
        lane.not_before = self._clock() + self._patience_s(lane.failures, outcome)
        self._put_aside(lane)
        self._bound_memory()
        # Now it is known where it waits.
        self._report.note(lane.signal, points, outcome)

    def _patience_s(self, failures: int, outcome: Outcome) -> float:
        least, most = self._backoff_s
        patience = min(least * 2.0 ** min(failures - 1, 30), most) * (0.5 + self._jitter())
        if outcome.retry_after_s is None:
            return patience
        # Not before the collector asked for, and not all nodes in the same moment after it.
        wish = min(outcome.retry_after_s, LONGEST_WISH_S) * (1.0 + 0.5 * self._jitter())
        return max(patience, wish)

    def _to_disk(self, lane: _Lane) -> bool:
        """Everything of a lane, oldest first; stops at the first that the disk does not take."""
        flying = lane.in_flight
        while lane.queue:
            item = lane.queue[0]
            if item.entry is None:
                request = item.request
                item.entry = self._spool.append(
                    *(request.signal, request.body, request.points),
                    lasting=request.lasting,
                    oldest_s=request.oldest_s,
                )
                if item.entry is None:
                    return False
                if item is flying:
                    # If it arrives after all, its copy is removed; if not, it is on disk.
                    self._spool.keep(item.entry)
            lane.queue.popleft()
            self._memory_bytes -= len(item.request.body)
            self._settle(item)
        return True

    def _put_aside(self, lane: _Lane) -> None:
        """The collector is away: what waits goes to disk, or, where that takes nothing, stays."""
        if self._to_disk(lane):
            return
        for item in lane.queue:
            item.batch.stuck = True
        # Of how series stand only the newest is worth the memory. What is lost is resolution, and
        # the last state of a series that ended meanwhile: so it is counted.
        standing = list(self._waiting(lane, lasting=False))
        for item in standing:
            if item.batch is not standing[-1].batch:
                self._drop(lane, item, "superseded")

    def _bound_memory(self) -> None:
        """Where neither network nor disk takes it: a bound; what stands goes before what lasts."""
        if self._memory_bytes <= self._memory_limit_bytes:
            return
        for lane in self._lanes.values():
            self._to_disk(lane)
        for lane in self._lanes.values():
            for item in list(self._waiting(lane, lasting=False)):
                if self._memory_bytes > self._memory_limit_bytes:
                    self._drop(lane, item, "memory_full")
        while self._memory_bytes > self._memory_limit_bytes:
            heads = [
                (first.number, lane, first)
                for lane in self._lanes.values()
                if (first := next(self._waiting(lane, lasting=True), None))
            ]
            if not heads:
                return
            _, lane, oldest = min(heads, key=lambda head: head[0])
            self._drop(lane, oldest, "memory_full")

    def _waiting(self, lane: _Lane, lasting: bool) -> Iterator[_Item]:
        """What lies in memory and is not under way, oldest first."""
        flying = lane.in_flight
        return (i for i in lane.queue if i.request.lasting is lasting and i is not flying)

    def _drop(self, lane: _Lane, item: _Item, why: str) -> None:
        lane.queue.remove(item)
        self._memory_bytes -= len(item.request.body)
        self._report.lost(why, item.request.points)
        self._settle(item)

    def _settle(self, item: _Item) -> None:
        item.batch.waiting -= 1

    def _call_settled(self) -> None:
        """Without the lock: who is called may hand in the next batch."""
        with self._settling:
            while (batch := self._next_settled()) is not None:
                if batch.settled is not None:
                    _call(batch.settled)

    def _next_settled(self) -> _Batch | None:
        with self._changed:
            for batch in self._batches:
                if not batch.waiting:
                    self._batches.remove(batch)
                    return batch
                if not batch.stuck:
                    return None
        return None

    # ------------------------------------------------------------------ what people see

    def snapshot(self) -> Facts:
        """How it goes."""
        with self._changed:
            return self._report.facts(
                lost=self._spool.dropped_points,
                memory_bytes=self._memory_bytes,
                spool_bytes=self._spool.size_bytes,
            )

    def _where_it_waits(self) -> str:
        parts = []
        if self._spool.entries:
            parts.append(f"{size(self._spool.size_bytes)} wait on disk")
        if self._memory_bytes:
            parts.append(f"{size(self._memory_bytes)} wait in memory")
        if self._spool.problem:
            parts.append(f"the disk does not take it ({self._spool.problem})")
        return ", ".join(parts) or "nothing waits"


@contained(default=Outcome("retry", "sending failed in an unknown way"))
def _send(transport: Sender, request: Request) -> Outcome:
    return transport.send(request.signal, request.body)


@contained()
def _call(settled: Callable[[], None]) -> None:
    settled()


def size(size_bytes: int) -> str:
    """As people say it; the only place with another unit than bytes."""
    if size_bytes < 1024 * 1024:
        return f"{size_bytes / 1024:.0f} KiB"
    return f"{size_bytes / (1024 * 1024):.1f} MiB"


__all__ = ["Delivery", "Facts", "Request", "Sender", "size"]
