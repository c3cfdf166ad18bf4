"""Sends the requests of a queue: each lane in order, independently of the others.

Only the oldest request of a lane is in flight. Each lane has a thread, because it may have its own
receiver: a trace backend that is down delays no metrics. A request that is accepted at once never
touches the disk; if a lane has to wait, its requests are in files.

The log has a line when a lane begins to fail, when it recovers, and when data is lost; each cause
every five minutes at most.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from otel_ddp import errors
from otel_ddp.agent.export.folder import Request, Waiting
from otel_ddp.agent.kept_thread import KeptThread

log = logging.getLogger("otel_ddp.agent")

LOG_EVERY_S = 300.0
# Limit of the pause that a receiver asks for.
_RETRY_AFTER_LIMIT_S = 60.0
# A request that may itself cause the receiver's errors is dropped after this time, so that later
# ones are sent.
_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt to send."""

    kind: Literal["delivered", "retry", "refused"]
    """`retry`: the attempt may be repeated. `refused`: the receiver rejects the content."""
    why: str = ""
    """One short line, without any credentials."""
    retry_after_s: float = 0.0
    """The pause that the receiver asks for."""
    doubtful: bool = False
    """For `retry`: whether the cause may be this request."""
    rejected: int = 0
    """Points, spans or records that the collector dropped from an accepted request."""


Send = Callable[[str, bytes], Outcome]
"""Makes one attempt for a lane; raises nothing."""


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(
        self,
        shortest_s: float,
        longest_s: float,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._clock = clock
        self._jitter = jitter
        self._due_at = 0.0
        self.failures = 0
        """The number of failed attempts since the last success."""

    def fail(self, asked_s: float = 0.0) -> None:
        """Start the next, longer pause. *asked_s*: the shortest pause, if the receiver sets one."""
        pause_s = min(self._shortest_s * 2.0 ** min(self.failures, 30), self._longest_s)
        self.failures += 1
        pause_s = max(pause_s * (0.5 + self._jitter()), asked_s * (1.0 + 0.5 * self._jitter()))
        self._due_at = self._clock() + pause_s

    def succeed(self) -> None:
        """Reset the pause, so that the next attempt may follow at once."""
        self.failures, self._due_at = 0, 0.0

    def wait_s(self) -> float:
        """Seconds until the next attempt."""
        return max(self._due_at - self._clock(), 0.0)


@dataclass(eq=False)
class _Lane:
    name: str
    shown: str
    """The lane's name in the log."""
    thread: KeptThread
    backoff: Backoff
    doubted: Request | None = None
    """The request that may cause the receiver's errors, if the last outcome was doubtful."""
    doubted_since: float = 0.0
    trouble: str = ""
    """Why the last attempt failed; empty after a success."""
    trouble_since_s: float = 0.0
    trouble_logged: bool = False


class Delivery:
    """Sends in its threads if the caller runs them, otherwise when `send_next` is called."""

    def __init__(
        self,
        queue: Waiting,
        send: Send,
        names: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        *,
        backoff_s: tuple[float, float] = (1.0, 30.0),
        jitter: Callable[[], float] = random.random,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """*names*: the name of each lane in the log."""
        self.queue = queue
        self._send = send
        self._clock = clock
        self._patience_s = patience_s
        self.lock = threading.Condition()
        """Guards the queue and the lanes. Held during small writes to disk, never while sending."""
        self.attempts = Counter(delivered=0, failed=0, refused=0)
        self._lanes = {
            name: _Lane(
                name,
                names[name],
                KeptThread(name, partial(self._run, name)),
                Backoff(*backoff_s, clock, jitter),
            )
            for name in queue.lanes
        }
        # When each lane, and the losses of each cause, were last logged.
        self._logged_at: dict[str, float] = {}
        self._stopping = False

    # -- called by the agent

    def threads(self) -> list[KeptThread]:
        """One thread per lane, which the caller may keep running."""
        return [each.thread for each in self._lanes.values()]

    def put(self, requests: Iterable[Request]) -> None:
        """Queue requests one by one: the first ones are sent while the next one is rendered."""
        for request in requests:
            with self.lock:
                self.queue.add(request)
                oldest = self.queue.oldest(request.lane)
                # A request behind others on disk has to wait anyway: on disk, it survives a crash.
                if (oldest and oldest.number) or not self._lanes[request.lane].thread.is_alive():
                    self.queue.write(request.lane)
                self._log_losses()
                self.lock.notify_all()

    def is_under_way(self) -> bool:
        """Whether a request that is in memory only may be accepted in a moment."""
        with self.lock:
            newest = [
                self.queue.newest(lane.name)
                for lane in self._lanes.values()
                if not lane.backoff.failures
            ]
            return any(request and not request.number for request in newest)

    def secure(self, timeout_s: float) -> None:
        """Wait for *timeout_s* at most, then write the requests that are not accepted to disk."""
        with self.lock:
            if not self.lock.wait_for(lambda: not self.is_under_way(), timeout_s):
                self._write_all()

    def stop(self, flush_s: float, join_s: float) -> None:
        """Send for *flush_s* at most, write the rest to disk, and end the threads."""
        with self.lock:
            for lane in self._lanes.values():
                # This is the last chance to send, so skip the backoff.
                lane.backoff.succeed()
            self.lock.notify_all()
            self.lock.wait_for(self._is_idle, flush_s)
            self._stopping = True
            self.lock.notify_all()
            # Write requests in flight too: if they are accepted after all, their files are removed.
            self._write_all()
        deadline = time.monotonic() + join_s
        for thread in self.threads():
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _write_all(self) -> None:
        for lane in self._lanes:
            self.queue.write(lane)

    def _is_idle(self) -> bool:
        """Whether each lane is empty or has to wait."""
        return not any(
            self.queue.oldest(lane.name) and not lane.backoff.failures and lane.thread.is_alive()
            for lane in self._lanes.values()
        )

    def failures(self, lane: str) -> int:
        """The failed attempts since the last success."""
        return self._lanes[lane].backoff.failures

    def troubles(self) -> dict[str, str]:
        """For each failing lane: the reason of the failure, and since when it fails."""
        with self.lock:
            return {
                lane.name: f"{lane.trouble} since {_time_of_day(lane.trouble_since_s)}"
                for lane in self._lanes.values()
                if lane.trouble
            }

    # -- the threads

    def _run(self, name: str) -> None:
        lane = self._lanes[name]
        while True:
            wait_s = self.send_next(name)
            with self.lock:
                if self._stopping:
                    return
                # Check again under the lock, since a request may have been added meanwhile.
                if wait_s != 0.0 and (wait_s := self._due_in_s(lane)) != 0.0:
                    self.lock.wait(wait_s)

    def send_next(self, name: str) -> float | None:
        """Send the lane's next request if it is due.

        Returns the seconds until the next one is due; None if the lane is empty.
        """
        lane = self._lanes[name]
        with self.lock:
            request = self.queue.oldest(name)
            if request is None or self._stopping or lane.backoff.wait_s():
                return self._due_in_s(lane)
            body = self._read(lane, request)
        if body is None:
            return 0.0
        # If an error ends this thread, the request is still queued for the next thread.
        outcome = _attempt(self._send, name, body)
        with self.lock:
            self._finish(lane, request, outcome)
            self.lock.notify_all()
        return 0.0

    def _due_in_s(self, lane: _Lane) -> float | None:
        """Seconds until the lane's oldest request may be sent; None if the lane is empty."""
        return lane.backoff.wait_s() if self.queue.oldest(lane.name) else None

    def _read(self, lane: _Lane, request: Request) -> bytes | None:
        """The body of a request; None if its file is gone, or not readable now."""
        try:
            body = request.read()
        except FileNotFoundError:
            # Another program has deleted the file.
            self.queue.remove(request, "spool_error")
            return None
        except OSError as error:
            # No descriptor is free, or a file server does not answer: retry later.
            why = f"{request.path} cannot be read: {error.strerror or error}"
            self._postpone(lane, Outcome("retry", why))
            return None
        if body is None:
            self.queue.remove(request, "corrupt")
        return body

    def _finish(self, lane: _Lane, request: Request, outcome: Outcome) -> None:
        outcome = self._decided(lane, request, outcome)
        if outcome.kind == "retry":
            self._postpone(lane, outcome)
            return
        # The receiver has answered, so the next request may follow at once.
        lane.backoff.succeed()
        self.attempts[outcome.kind] += 1
        # Count causes by the part before the first colon: the rest differs between answers.
        cause = f"{lane.shown}: {outcome.why.split(': ')[0]}"
        self.queue.remove(request, outcome.kind, cause)
        self.queue.lose(outcome.rejected, "rejected", cause)
        if outcome.kind == "refused":
            self._fail(lane, outcome.why)
        elif lane.trouble:
            if lane.trouble_logged:
                lasted_s = time.time() - lane.trouble_since_s
                waits = self.queue.describe()
                log.warning("%s: taken again after %.0f s; %s.", lane.shown, lasted_s, waits)
            lane.trouble = ""
        self._log_losses()

    def _decided(self, lane: _Lane, request: Request, outcome: Outcome) -> Outcome:
        """Resolve a doubtful outcome: retry for `patience_s`, then treat it as refused."""
        if not outcome.doubtful:
            lane.doubted = None
            return outcome
        now = self._clock()
        if lane.doubted is not request:
            lane.doubted, lane.doubted_since = request, now
        waits = now - lane.doubted_since < self._patience_s
        return replace(outcome, kind="retry" if waits else "refused")

    def _postpone(self, lane: _Lane, outcome: Outcome) -> None:
        lane.backoff.fail(min(outcome.retry_after_s, _RETRY_AFTER_LIMIT_S))
        self.queue.write(lane.name)
        self.attempts["failed"] += 1
        self._fail(lane, outcome.why)
        # Log after the write, so that the line says whether the requests are on disk.
        if self._is_due(lane.name):
            lane.trouble_logged = True
            log.warning("%s: %s; %s.", lane.shown, outcome.why, self.queue.describe())

    def _fail(self, lane: _Lane, why: str) -> None:
        if not lane.trouble:
            lane.trouble_since_s, lane.trouble_logged = time.time(), False
        lane.trouble = why

    def _log_losses(self) -> None:
        for cause, points in list(self.queue.unlogged.items()):
            if self._is_due(cause):
                log.warning("%s; dropped: %d.", cause, points)
                del self.queue.unlogged[cause]

    def _is_due(self, line: str) -> bool:
        """Whether this line may be logged again; starts its interval."""
        now = self._clock()
        if line in self._logged_at and now - self._logged_at[line] < LOG_EVERY_S:
            return False
        self._logged_at[line] = now
        return True


def _time_of_day(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


@errors.contained(default=Outcome("retry", "sending failed: the agent's log says how"))
def _attempt(send: Send, lane: str, body: bytes) -> Outcome:
    return send(lane, body)
