"""Reports how the delivery goes: as counts, as a sentence, and in a few log lines."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from otel_ddp.agent.export.otlp import SIGNALS, Outcome, Signal

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


@dataclass(frozen=True)
class DeliveryStatus:
    """How the delivery goes at one moment."""

    delivered: int
    """Requests that the collector accepted."""
    failed: int
    """Attempts that are repeated later."""
    refused: int
    """Requests that the collector refused."""
    dropped_points: Mapping[str, int]
    """Points that are lost, by reason: refused, rejected (out of a request that the collector
    accepted), memory_full, spool_full, spool_error, corrupt."""
    memory_bytes: int
    spool_bytes: int
    state: str


class DeliveryReport:
    """Not locked: the delivery calls it under its own lock."""

    def __init__(
        self, destination: str | None, backlog: Callable[[], str], clock: Callable[[], float]
    ) -> None:
        """*destination*: None: all waits. *backlog*: says what waits, and where."""
        self._destination = destination
        self._backlog = backlog
        self._clock = clock
        self.lost: Counter[str] = Counter()
        """Points that will never arrive, by reason."""
        self._counts: Counter[str] = Counter()
        # Why the last attempt of each signal that was used failed, and since when such fail.
        self._troubles: dict[Signal, tuple[str, float]] = {}
        self._outage_began: float | None = None
        # When each line was last said, and the points by cause that no line has told of.
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()

    def add_outcome(self, signal: Signal, points: int, outcome: Outcome) -> None:
        """Count one attempt, and log it if it is news."""
        self._counts[outcome.kind] += 1
        before, since_s = self._troubles.get(signal, ("", 0.0))
        if outcome.kind == "delivered":
            self._troubles[signal] = ("", 0.0)
            self._lose("rejected", outcome.rejected, f"OTLP {signal}: {outcome.why}")
            self._log_recovery()
            return
        self._troubles[signal] = (outcome.why, since_s if before else time.time())
        if outcome.kind == "refused":
            self._lose("refused", points, f"OTLP {signal}: {outcome.why}")
        else:
            self._log_outage(signal, outcome.why)

    def _lose(self, reason: str, points: int, cause: str) -> None:
        if points:
            self.lost[reason] += points
            self._add_loss(cause, points)

    def poll_losses(self, lost: Mapping[str, int]) -> None:
        """Say what was lost since the last call, here and elsewhere (*lost*)."""
        counters = {**self.lost, **lost}
        for reason, cause in _CAUSES.items():
            if more := counters.get(reason, 0) - self._counted[reason]:
                self._counted[reason] += more
                self._add_loss(f"OTLP: {cause}", more)
        for cause in list(self._unsaid):
            self._say(cause)

    def status(
        self, *, lost: Mapping[str, int], memory_bytes: int, spool_bytes: int
    ) -> DeliveryStatus:
        """All counts; *lost*: the points that were lost elsewhere."""
        return DeliveryStatus(
            delivered=self._counts["delivered"],
            failed=self._counts["retry"],
            refused=self._counts["refused"],
            dropped_points={**self.lost, **lost},
            memory_bytes=memory_bytes,
            spool_bytes=spool_bytes,
            state=self._describe(),
        )

    def _describe(self) -> str:
        if self._destination is None:
            return f"offline: {self._backlog()}"
        for signal in SIGNALS:
            why, since_s = self._troubles.get(signal, ("", 0.0))
            if why:
                others_work = any(not other for other, _ in self._troubles.values())
                which = f"{signal}: " if others_work else ""
                since = time.strftime("%H:%M:%S", time.localtime(since_s))
                return f"{which}{why} since {since}, {self._backlog()}"
        done = "delivering" if self._troubles else "nothing sent yet"
        return f"{done} to {self._destination}"

    # -- lines of the log

    def _log_outage(self, signal: Signal, why: str) -> None:
        if self._outage_began is None:
            self._outage_began = self._clock()
        if self._is_due("outage"):
            log.warning("OTLP %s: %s; %s.", signal, why, self._backlog())

    def _log_recovery(self) -> None:
        began = self._outage_began
        if began is None or any(why for why, _ in self._troubles.values()):
            return
        self._outage_began = None
        if self._said_at["outage"] >= began:
            sentence = "OTLP: %s takes data again after %.0f s; %s."
            log.warning(sentence, self._destination, self._clock() - began, self._backlog())

    def _add_loss(self, cause: str, points: int) -> None:
        """Points are lost now; the first ones of a cause are said at once."""
        # What stands behind the second colon differs from one answer to the next.
        cause = ": ".join(cause.split(": ")[:2])
        self._unsaid[cause] += points
        self._say(cause)

    def _say(self, cause: str) -> None:
        if self._is_due(cause):
            log.warning("%s; points dropped: %d.", cause, self._unsaid.pop(cause))

    def _is_due(self, line: str) -> bool:
        """Whether a line may be said, which it is then."""
        now = self._clock()
        if line in self._said_at and now - self._said_at[line] < LOG_EVERY_S:
            return False
        self._said_at[line] = now
        return True


def human_size(size_bytes: int) -> str:
    """A size for people; the only place with another unit than bytes."""
    if size_bytes < 1024 * 1024:
        return f"{size_bytes / 1024:.0f} KiB"
    return f"{size_bytes / (1024 * 1024):.1f} MiB"
