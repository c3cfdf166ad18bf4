"""Sends what waits in a queue: each lane in its order, and none waits for another.

Only the oldest request of a lane is ever being sent. A lane may have a thread of its own, because
each may have its own receiver: a trace backend that is down or does not answer delays no metrics.

A request that is taken at once never touches a disk. Those of a lane that has to wait are in files.

The log has a line when a lane begins to fail, when it is taken again, and when something is lost,
and each cause every five minutes at most.
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
# A receiver that asks for a longer pause is tried again after this one.
_RETRY_AFTER_LIMIT_S = 60.0
# How long one request waits where the receiver may fail over it. Then the next ones get their turn.
_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """How one attempt to send went."""

    kind: Literal["delivered", "retry", "refused"]
    """`retry`: kept for later, because people can mend the cause. `refused`: the receiver says that
    these bytes are wrong."""
    why: str = ""
    """One short line, without any credentials."""
    retry_after_s: float = 0.0
    """The pause that the receiver asks for."""
    doubtful: bool = False
    """To be tried again, but the cause may be this request: a receiver that fails over it."""
    rejected: int = 0
    """Points, spans or records that the collector dropped out of a request that it accepted."""


Send = Callable[[str, bytes], Outcome]
"""Makes one attempt for a lane, and raises nothing."""


class Backoff:
    """Each pause is twice as long as the one before, and nodes do not come in the same moment."""

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
        """Since the last success."""

    def fail(self, asked_s: float = 0.0) -> None:
        """*asked_s*: the pause that the receiver asks for at least."""
        pause_s = min(self._shortest_s * 2.0 ** min(self.failures, 30), self._longest_s)
        self.failures += 1
        pause_s = max(pause_s * (0.5 + self._jitter()), asked_s * (1.0 + 0.5 * self._jitter()))
        self._due_at = self._clock() + pause_s

    def succeed(self) -> None:
        """The next try need not wait."""
        self.failures, self._due_at = 0, 0.0

    def wait_s(self) -> float:
        """How long until the next try."""
        return max(self._due_at - self._clock(), 0.0)


@dataclass(eq=False)
class _Lane:
    name: str
    shown: str
    """What the log calls it."""
    thread: KeptThread
    backoff: Backoff
    doubted: Request | None = None
    """The request that answers may be about; else they are about the way to the receiver."""
    doubted_since: float = 0.0
    trouble: str = ""
    """Why the last attempt failed; empty where it was taken."""
    trouble_since_s: float = 0.0
    trouble_logged: bool = False


class Delivery:
    """Sends on threads of its own once it is started, and else whenever `send_next` is called."""

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
        """*names*: what the log calls each lane."""
        self.queue = queue
        self._send = send
        self._clock = clock
        self._patience_s = patience_s
        self.lock = threading.Condition()
        """Of the queue and all that follows. It is held over small writes to disk, never over the
        network."""
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
        # When each line of the log, and the losses of each cause, were logged last.
        self._logged_at: dict[str, float] = {}
        self._stopping = False

    # -- called by the agent

    def threads(self) -> list[KeptThread]:
        """The thread of each lane, which the caller keeps running if it wants them."""
        return [each.thread for each in self._lanes.values()]

    def put(self, requests: Iterable[Request]) -> None:
        """Add requests behind those that wait; while one is made, those before it are sent."""
        for request in requests:
            with self.lock:
                self.queue.add(request)
                oldest = self.queue.oldest(request.lane)
                # Behind those on disk there is no hurry, and a crash would lose less.
                if (oldest and oldest.number) or not self._lanes[request.lane].thread.is_alive():
                    self.queue.write(request.lane)
                self._log_losses()
                self.lock.notify_all()

    def is_under_way(self) -> bool:
        """Whether a request is in memory alone that may be taken in a moment."""
        with self.lock:
            newest = [
                self.queue.newest(lane.name)
                for lane in self._lanes.values()
                if not lane.backoff.failures
            ]
            return any(request and not request.number for request in newest)

    def secure(self, timeout_s: float) -> None:
        """Put on disk what is not taken within this time."""
        with self.lock:
            if not self.lock.wait_for(lambda: not self.is_under_way(), timeout_s):
                self._write_all()

    def stop(self, flush_s: float, join_s: float) -> None:
        """Send what can be sent in this time, put the rest on disk, and end."""
        with self.lock:
            for lane in self._lanes.values():
                # The last chance: one that pauses after a failure is tried now.
                lane.backoff.succeed()
            self.lock.notify_all()
            self.lock.wait_for(self._is_idle, flush_s)
            self._stopping = True
            self.lock.notify_all()
            # Also what is being sent: if it arrives after all, its file is removed.
            self._write_all()
        deadline = time.monotonic() + join_s
        for thread in self.threads():
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _write_all(self) -> None:
        for lane in self._lanes:
            self.queue.write(lane)

    def _is_idle(self) -> bool:
        """Whether nothing is being sent: what waits is refused, or nobody sends it."""
        return not any(
            self.queue.oldest(lane.name) and not lane.backoff.failures and lane.thread.is_alive()
            for lane in self._lanes.values()
        )

    def failures(self, lane: str) -> int:
        """How many attempts have failed since the last success."""
        return self._lanes[lane].backoff.failures

    def troubles(self) -> dict[str, str]:
        """Of each lane whose last attempt failed: why, and since when such fail."""
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
                # Asked again under the lock: a request may have been added meanwhile.
                if wait_s != 0.0 and (wait_s := self._due_in_s(lane)) != 0.0:
                    self.lock.wait(wait_s)

    def send_next(self, name: str) -> float | None:
        """Send one request of a lane if one is due; the seconds until one is, or None."""
        lane = self._lanes[name]
        with self.lock:
            request = self.queue.oldest(name)
            if request is None or self._stopping or lane.backoff.wait_s():
                return self._due_in_s(lane)
            body = self._read(lane, request)
        if body is None:
            return 0.0
        # Where an error ends the thread it is started again: the request is still there.
        outcome = _attempt(self._send, name, body)
        with self.lock:
            self._finish(lane, request, outcome)
            self.lock.notify_all()
        return 0.0

    def _due_in_s(self, lane: _Lane) -> float | None:
        """In how many seconds its oldest request may be sent; None if nothing waits."""
        return lane.backoff.wait_s() if self.queue.oldest(lane.name) else None

    def _read(self, lane: _Lane, request: Request) -> bytes | None:
        """Its body; None where it is gone, or cannot be read now."""
        try:
            body = request.read()
        except FileNotFoundError:
            # Another program has removed it.
            self.queue.remove(request, "spool_error")
            return None
        except OSError as error:
            # Too many open files, or a file server that is away: the file can be read later.
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
        # The receiver answers, so the next request need not wait.
        lane.backoff.succeed()
        self.attempts[outcome.kind] += 1
        # What stands behind the first colon differs from one answer to the next.
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
        """An outcome that may be about this request, or about the way, is taken for one of them."""
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
        # After the write: the line tells where the requests wait.
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
        """Whether a line may be logged, which it is then."""
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
