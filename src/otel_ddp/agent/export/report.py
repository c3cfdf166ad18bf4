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

_CAUSES = {
    "spool_full": (
        "the spool is full (OTEL_DDP_SPOOL_BYTES): the oldest data make room for the newest"
    ),
    "memory_full": "neither the collector nor the disk takes them, and memory is full",
    "history_full": "they were logged faster than they could be exported",
    "corrupt": "a file of the spool is damaged",
    "spool_error": "files of the spool are gone",
}


@dataclass(frozen=True)
class DeliveryStatus:
    """How the delivery goes at one moment."""

    delivered: int
    """Requests that the collector accepted."""
    delivered_points: int
    failed: int
    """Attempts that are repeated later."""
    refused: int
    """Requests that the collector refused."""
    refused_points: Mapping[str, int]
    """Points in those, and those that it dropped out of others, by reason."""
    dropped_points: Mapping[str, int]
    """Points that are lost, by reason: refused, rejected (out of a request that the collector
    accepted), memory_full, spool_full, spool_error, corrupt."""
    memory_bytes: int
    spool_bytes: int
    state: str
    troubles: Mapping[Signal, str]
    """Why the last attempt of a signal failed; empty if it did not."""


@dataclass
class _Loss:
    """One cause by which points are lost."""

    said_at: float | None = None
    unsaid: int = 0
    total: int = 0


class DeliveryReport:
    """Not locked: the delivery calls it under its own lock."""

    def __init__(
        self,
        destination: str,
        backlog: Callable[[], str],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """*backlog*: says what waits, and where."""
        self._destination = destination
        self._backlog = backlog
        self._clock = clock
        self._wall = wall
        self.lost: Counter[str] = Counter()
        """Points that will never arrive, by reason."""
        self._counts: Counter[str] = Counter()
        # Why the last attempt of each signal that was used failed, and since when such fail.
        self._troubles: dict[Signal, tuple[str, float]] = {}
        self._outage_began: float | None = None
        self._outage_said_at: float | None = None
        self._outage_is_said = False
        # By signal, or "" where it is no answer about one, and by cause.
        self._losses: dict[tuple[str, str], _Loss] = {}
        self._counted: Counter[str] = Counter()

    def add_outcome(
        self, signal: Signal, points: int, outcome: Outcome, disk_problem: str | None = None
    ) -> None:
        """Count one attempt, and log it if it is news."""
        self._counts[outcome.kind] += 1
        before, since_s = self._troubles.get(signal, ("", 0.0))
        if outcome.kind == "delivered":
            self._troubles[signal] = ("", 0.0)
            self._counts["points"] += points
            self._lose(signal, "rejected", outcome.why, outcome.rejected)
            self._log_recovery()
            return
        self._troubles[signal] = (outcome.why, since_s if before else self._wall())
        if outcome.kind == "refused":
            self._lose(signal, "refused", outcome.why, points)
        else:
            self._log_outage(signal, outcome.why, disk_problem)

    def _lose(self, signal: Signal, reason: str, why: str, points: int) -> None:
        if points:
            self.lost[reason] += points
            self._add_loss(signal, why, points)

    def poll_losses(self, lost: Mapping[str, int], has_room: bool) -> None:
        """Say what was lost since the last call, here and elsewhere (*lost*).

        *has_room*: whether the spool has.
        """
        counters = {**self.lost, **lost}
        for reason, cause in _CAUSES.items():
            if more := counters.get(reason, 0) - self._counted[reason]:
                self._counted[reason] += more
                self._add_loss("", cause, more)
        for (signal, cause), loss in self._losses.items():
            self._say(loss, signal, cause)
        if has_room and (full := self._losses.pop(_key("", _CAUSES["spool_full"]), None)):
            log.warning("OTLP: the spool has room again; %d points were dropped.", full.total)

    def status(
        self, *, lost: Mapping[str, int], memory_bytes: int, spool_bytes: int
    ) -> DeliveryStatus:
        """All counts; *lost*: the points that were lost elsewhere."""
        refused = {cause: loss.total for (signal, cause), loss in self._losses.items() if signal}
        return DeliveryStatus(
            delivered=self._counts["delivered"],
            delivered_points=self._counts["points"],
            failed=self._counts["retry"],
            refused=self._counts["refused"],
            refused_points=refused,
            dropped_points={**self.lost, **lost},
            memory_bytes=memory_bytes,
            spool_bytes=spool_bytes,
            state=self._describe(),
            troubles={signal: why for signal, (why, _) in self._troubles.items()},
        )

    def _describe(self) -> str:
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

    def _log_outage(self, signal: Signal, why: str, disk_problem: str | None) -> None:
        now = self._clock()
        if self._outage_began is None:
            self._outage_began = now
        if not self._is_due(self._outage_said_at):
            return
        self._outage_said_at, self._outage_is_said = now, True
        where = "on disk"
        if disk_problem:
            where = f"in memory: the disk does not take it ({disk_problem})"
        log.warning("OTLP %s: %s; what cannot be delivered waits %s.", signal, why, where)

    def _log_recovery(self) -> None:
        if self._outage_began is None or any(why for why, _ in self._troubles.values()):
            return
        lasted_s = self._clock() - self._outage_began
        if self._outage_is_said:
            sentence = "OTLP: %s takes data again after %.0f s; %s."
            log.warning(sentence, self._destination, lasted_s, self._backlog())
        self._outage_began, self._outage_is_said = None, False

    def _add_loss(self, signal: str, cause: str, points: int) -> None:
        """Points are lost now; the first ones of a cause are said at once."""
        loss = self._losses.setdefault(_key(signal, cause), _Loss())
        loss.unsaid += points
        loss.total += points
        self._say(loss, signal, cause)

    def _say(self, loss: _Loss, signal: str, cause: str) -> None:
        if not loss.unsaid or not self._is_due(loss.said_at):
            return
        more = "" if loss.said_at is None else "more "
        count = f"1 {more}point is" if loss.unsaid == 1 else f"{loss.unsaid} {more}points are"
        log.warning("OTLP%s: %s dropped: %s.", f" {signal}" if signal else "", count, cause)
        loss.said_at, loss.unsaid = self._clock(), 0

    def _is_due(self, said_at: float | None) -> bool:
        return said_at is None or self._clock() - said_at >= LOG_EVERY_S


def _key(signal: str, cause: str) -> tuple[str, str]:
    # What stands behind the colon differs from one answer to the next.
    return signal, cause.partition(": ")[0]


def human_size(size_bytes: int) -> str:
    """A size for people; the only place with another unit than bytes."""
    if size_bytes < 1024 * 1024:
        return f"{size_bytes / 1024:.0f} KiB"
    return f"{size_bytes / (1024 * 1024):.1f} MiB"
