"""Sends queued requests over several lanes, such as one for metrics and one for traces.

Each lane sends its requests in order, one at a time. It has its own thread, because it may have its
own receiver: a trace backend that is down delays no metrics. A request that is accepted at once
never touches the disk. Once a lane has to wait, its requests are written to files.

A line is logged when a lane begins to fail, when it recovers, and when data is lost, but for each
cause at most every five minutes.
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
# The longest pause that a receiver can demand with Retry-After.
_RETRY_AFTER_LIMIT_S = 60.0
# The receiver's errors may be caused by the request that is being sent. Then it is dropped after
# this time, so that it does not block the requests behind it.
_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt to send."""

    kind: Literal["delivered", "retry", "refused"]
    """`retry`: the attempt may be repeated. `refused`: the receiver rejects the content."""
    why: str = ""
    """The reason in one short line, without credentials."""
    retry_after_s: float = 0.0
    """The pause that the receiver asks for."""
    doubtful: bool = False
    """For `retry`: whether the content of this request may be what causes the error."""
    rejected: int = 0
    """Points, spans or records that the collector dropped from an accepted request."""


Send = Callable[[str, bytes], Outcome]
"""Tries once to send a body on a lane. Raises nothing."""


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
        """Start the next pause, longer than the last. *asked_s*: the receiver's shortest pause, or
        0."""
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
    """The request that may cause the receiver's errors, after a doubtful outcome."""
    doubted_since: float = 0.0
    trouble: str = ""
    """Why the last attempt failed; empty after a success."""
    trouble_since_s: float = 0.0
    trouble_logged: bool = False


class Delivery:
    """Sends a queue's requests: in threads, or in the caller's thread by `send_next`."""

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
        """*names*: for each lane, the name that the log shows."""
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
        # When a line about each lane, or about losses of each cause, was last logged.
        self._logged_at: dict[str, float] = {}
        self._stopping = False

    # -- called by the agent

    def threads(self) -> list[KeptThread]:
        """One thread per lane. The caller starts them, and restarts a thread that ended."""
        return [each.thread for each in self._lanes.values()]

    def put(self, requests: Iterable[Request]) -> None:
        """Queue requests one by one, so that the first is sent while the second is rendered."""
        for request in requests:
            with self.lock:
                self.queue.add(request)
                oldest = self.queue.oldest(request.lane)
                # If older requests of the lane wait on disk, this one has to wait too. Write it to
                # disk as well, so that it survives a crash.
                if (oldest and oldest.number) or not self._lanes[request.lane].thread.is_alive():
                    self.queue.write(request.lane)
                self._log_losses()
                self.lock.notify_all()

    def is_under_way(self) -> bool:
        """Whether a request that is only in memory may soon be accepted: its lane has no
        failures."""
        with self.lock:
            newest = [
                self.queue.newest(lane.name)
                for lane in self._lanes.values()
                if not lane.backoff.failures
            ]
            return any(request and not request.number for request in newest)

    def secure(self, timeout_s: float) -> None:
        """Wait for deliveries for at most *timeout_s*, then write the remaining requests to
        disk."""
        with self.lock:
            if not self.lock.wait_for(lambda: not self.is_under_way(), timeout_s):
                self._write_all()

    def stop(self, flush_s: float, join_s: float) -> None:
        """Send for at most *flush_s*, write the remaining requests to disk, and end the threads."""
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
        """Whether nothing more will be sent now: each lane is empty, failing or without a
        thread."""
        return not any(
            self.queue.oldest(lane.name) and not lane.backoff.failures and lane.thread.is_alive()
            for lane in self._lanes.values()
        )

    def failures(self, lane: str) -> int:
        """The number of the lane's failed attempts since its last success."""
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
                # A request may have been added since `send_next` returned, so check again under the
                # lock.
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
        """Read the body of a request; None if its file is gone or damaged, or cannot be read
        now."""
        try:
            body = request.read()
        except FileNotFoundError:
            # Another program has deleted the file.
            self.queue.remove(request, "spool_error")
            return None
        except OSError as error:
            # For example, no file descriptor is free, or a file server does not answer: retry
            # later.
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
        # The receiver has accepted or refused the request, so send the next one without a pause.
        lane.backoff.succeed()
        self.attempts[outcome.kind] += 1
        # Group the losses by the text before the first colon, since the rest differs with each
        # answer.
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
        """Replace a doubtful outcome by `retry`, or by `refused` once `patience_s` has passed."""
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
        # Log only now, after the write to disk: the line says how much waits on disk and in memory.
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
        """Whether a line for this lane or cause may be logged again; if so, restart its
        interval."""
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
