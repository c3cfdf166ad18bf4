"""Reports how the delivery goes: as counts, as a sentence, and in a few log lines."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from otel_ddp.agent.queue import Outcome
from otel_ddp.agent.queue.folder import Waiting

log = logging.getLogger("otel_ddp.agent")

LOG_EVERY_S = 300.0

# Losses that no answer of a collector tells of.
_CAUSES = {
    "spool_full": (
        "the spool is full (OTEL_DDP_SPOOL_BYTES), so the oldest data make room for the newest"
    ),
    "memory_full": "neither the collector nor the disk takes them, and memory is full",
    "corrupt": "a file of the spool is damaged",
    "spool_error": "files of the spool are gone",
}


class DeliveryStatus(NamedTuple):
    """How the delivery goes at one moment."""

    attempts: Mapping[str, int]
    """How many there were, by outcome: delivered, failed (and repeated later), refused."""
    dropped_points: Mapping[str, int]
    """Points that are lost, by reason: what the queue has lost, refused, and rejected out of a
    request that the collector accepted."""
    spool_bytes: int
    state: str


class DeliveryReport:
    """Called under the lock of the delivery."""

    def __init__(self, destination: str, queue: Waiting, clock: Callable[[], float]) -> None:
        """*destination*: empty where all waits."""
        self._destination = destination
        self._queue = queue
        self._clock = clock
        self._attempts = Counter(delivered=0, failed=0, refused=0)
        # Why the last attempt of each signal that was used failed, and since when such fail.
        self._troubles: dict[str, tuple[str, float]] = {}
        self._outage_began: float | None = None
        # Points that collectors have refused, by reason and by cause; the queue counts the others.
        self._refused: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        # Dropped points already logged, by cause; and when each line was last logged.
        self._told: Counter[str] = Counter()
        self._said_at: dict[str, float] = {}

    def add_outcome(self, signal: str, points: int, outcome: Outcome) -> None:
        """Count one attempt, and log it if it is news."""
        self._attempts["failed" if outcome.kind == "retry" else outcome.kind] += 1
        before, since_s = self._troubles.get(signal, ("", 0.0))
        if outcome.kind == "delivered":
            self._troubles[signal] = ("", 0.0)
            self._log_recovery()
            self._lose("rejected", outcome.rejected, signal, outcome)
            return
        self._troubles[signal] = (outcome.why, since_s if before else time.time())
        if outcome.kind == "refused":
            self._lose("refused", points, signal, outcome)
        else:
            self._log_outage(signal, outcome.why)

    def _lose(self, reason: str, points: int, signal: str, outcome: Outcome) -> None:
        if points:
            self._refused[reason] += points
            # What stands behind the first colon differs from one answer to the next.
            self._causes[f"OTLP {signal}: {outcome.why.split(': ')[0]}"] += points
            self._log_losses()

    def status(self) -> DeliveryStatus:
        """All counts."""
        self._log_losses()
        dropped = {**self._refused, **self._queue.dropped}
        return DeliveryStatus(
            dict(self._attempts), dropped, self._queue.size_bytes, self._describe()
        )

    def _describe(self) -> str:
        if not self._destination:
            return f"offline: {self._queue.describe()}"
        for signal in self._queue.lanes:
            why, since_s = self._troubles.get(signal, ("", 0.0))
            if why:
                others_work = any(not other for other, _ in self._troubles.values())
                which = f"{signal}: " if others_work else ""
                since = time.strftime("%H:%M:%S", time.localtime(since_s))
                return f"{which}{why} since {since}, {self._queue.describe()}"
        done = "delivering" if self._troubles else "nothing sent yet"
        return f"{done} to {self._destination}"

    # -- lines of the log

    def _log_outage(self, signal: str, why: str) -> None:
        if self._outage_began is None:
            self._outage_began = self._clock()
        if self._is_due("outage"):
            log.warning("OTLP %s: %s; %s.", signal, why, self._queue.describe())

    def _log_recovery(self) -> None:
        began = self._outage_began
        if began is None or any(why for why, _ in self._troubles.values()):
            return
        self._outage_began = None
        if self._said_at["outage"] >= began:
            sentence = "OTLP: %s takes data again after %.0f s; %s."
            log.warning(sentence, self._destination, self._clock() - began, self._queue.describe())

    def _log_losses(self) -> None:
        """The first ones of a cause are said at once."""
        here = {f"OTLP: {_CAUSES[why]}": points for why, points in self._queue.dropped.items()}
        for cause, points in {**self._causes, **here}.items():
            if points > self._told[cause] and self._is_due(cause):
                log.warning("%s; points dropped: %d.", cause, points - self._told[cause])
                self._told[cause] = points

    def _is_due(self, line: str) -> bool:
        """Whether a line may be said, which it is then."""
        now = self._clock()
        if line in self._said_at and now - self._said_at[line] < LOG_EVERY_S:
            return False
        self._said_at[line] = now
        return True
