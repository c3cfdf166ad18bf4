"""Reports how the delivery goes: as counts, as a sentence, and in a few log lines."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from otel_ddp.agent.export.otlp.outcome import SIGNALS, Outcome, Signal

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
    rejected_points: int
    """Points that the collector dropped out of requests that it accepted."""
    dropped_points: Mapping[str, int]
    """Points that are lost, by reason: refused, memory_full, spool_full, spool_error,
    corrupt."""
    memory_bytes: int
    spool_bytes: int
    state: str
    troubles: Mapping[Signal, str]
    """Why the last attempt of a signal failed."""


@dataclass
class _SignalState:
    """How one signal goes."""

    used: bool = False
    trouble: str = ""
    """Why the last attempt failed; empty if it did not."""
    since_s: float = 0.0


class DeliveryReport:
    """Not locked: the delivery calls it under its own lock."""

    def __init__(
        self,
        destination: Callable[[], str],
        describe_backlog: Callable[[], str],
        disk_problem: Callable[[], str | None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._destination = destination
        self._describe_backlog = describe_backlog
        self._disk_problem = disk_problem
        self._clock = clock
        self._wall = wall
        self._signals = {signal: _SignalState() for signal in SIGNALS}
        self._counts: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._outage_began: float | None = None
        self._logged_at: float | None = None
        self._logged_outage = False
        self._losses = _LossLog(clock, _CAUSES)

    def add_outcome(self, signal: Signal, points: int, outcome: Outcome) -> None:
        """Count one attempt, and log it if it is news."""
        state = self._signals[signal]
        state.used = True
        self._counts[outcome.kind] += 1
        if outcome.kind == "delivered":
            state.trouble = ""
            self._counts["points"] += points
            self._counts["rejected"] += outcome.rejected
            if outcome.rejected:
                self._losses.add(signal, outcome.why, outcome.rejected)
            self._log_recovery()
            return
        if not state.trouble:
            state.since_s = self._wall()
        state.trouble = outcome.why
        if outcome.kind == "refused":
            self.add_lost("refused", points)
            self._losses.add(signal, outcome.why, points)
        else:
            self._log_outage(signal, outcome)

    def add_lost(self, why: str, points: int) -> None:
        """Count points that will never arrive."""
        self._lost[why] += points

    def poll_losses(self, lost: Mapping[str, int], has_room: bool) -> None:
        """Say what was lost since the last call, here and elsewhere (*lost*).

        *has_room*: whether the spool has.
        """
        self._losses.poll({**self._lost, **lost})
        if has_room and (points := self._losses.ended("spool_full")):
            log.warning("OTLP: the spool has room again; %d points were dropped.", points)

    def status(
        self, *, lost: Mapping[str, int], memory_bytes: int, spool_bytes: int
    ) -> DeliveryStatus:
        """All counts; *lost*: the points that were lost elsewhere."""
        return DeliveryStatus(
            delivered=self._counts["delivered"],
            delivered_points=self._counts["points"],
            failed=self._counts["retry"],
            refused=self._counts["refused"],
            refused_points=self._losses.of_signals(),
            rejected_points=self._counts["rejected"],
            dropped_points=dict(Counter(lost) + self._lost),
            memory_bytes=memory_bytes,
            spool_bytes=spool_bytes,
            state=self._describe(),
            troubles={signal: each.trouble for signal, each in self._signals.items()},
        )

    def _describe(self) -> str:
        troubled = [(signal, each) for signal, each in self._signals.items() if each.trouble]
        if not troubled:
            if not any(each.used for each in self._signals.values()):
                return f"nothing sent yet to {self._destination()}"
            return f"delivering to {self._destination()}"
        signal, first = troubled[0]
        since = time.strftime("%H:%M:%S", time.localtime(first.since_s))
        others_work = any(each.used and not each.trouble for each in self._signals.values())
        which = f"{signal}: " if others_work else ""
        return f"{which}{first.trouble} since {since}, {self._describe_backlog()}"

    # -- lines of the log

    def _log_outage(self, signal: Signal, outcome: Outcome) -> None:
        now = self._clock()
        if self._outage_began is None:
            self._outage_began = now
        if self._logged_at is not None and now - self._logged_at < LOG_EVERY_S:
            return
        self._logged_at = now
        self._logged_outage = True
        if problem := self._disk_problem():
            text = (
                f"what cannot be delivered waits in memory: the disk does not take it ({problem})"
            )
        else:
            text = "what cannot be delivered waits on disk"
        log.warning("OTLP %s: %s; %s.", signal, outcome.why, text)

    def _log_recovery(self) -> None:
        if self._outage_began is None or any(each.trouble for each in self._signals.values()):
            return
        lasted_s = self._clock() - self._outage_began
        self._outage_began = None
        if self._logged_outage:
            self._logged_outage = False
            log.warning(
                "OTLP: %s takes data again after %.0f s; %s.",
                self._destination(),
                lasted_s,
                self._describe_backlog(),
            )


def human_size(size_bytes: int) -> str:
    """A size for people; the only place with another unit than bytes."""
    if size_bytes < 1024 * 1024:
        return f"{size_bytes / 1024:.0f} KiB"
    return f"{size_bytes / (1024 * 1024):.1f} MiB"


@dataclass
class _Loss:
    """One cause by which points are lost."""

    said_at: float | None = None
    unsaid: int = 0
    total: int = 0


class _LossLog:
    """Not locked: the delivery calls it under its own lock."""

    def __init__(self, clock: Callable[[], float], causes: Mapping[str, str]) -> None:
        """*causes*: the counters to watch, each with the words for its cause."""
        self._clock = clock
        self._causes = causes
        self._losses: dict[tuple[str, str], _Loss] = {}
        self._counted: dict[str, int] = {}

    def add(self, signal: str, cause: str, points: int) -> None:
        """Points are lost now; the first ones of a cause are said at once."""
        # What stands behind the colon differs from one answer to the next.
        key = (signal, cause.partition(": ")[0])
        loss = self._losses.setdefault(key, _Loss())
        loss.unsaid += points
        loss.total += points
        if self._is_due(loss):
            self._say(loss, signal, cause)

    def poll(self, counters: Mapping[str, int]) -> None:
        """Say what the counters have grown by, and what was not said yet of other losses."""
        for name, cause in self._causes.items():
            more = counters.get(name, 0) - self._counted.get(name, 0)
            if more:
                self._counted[name] = counters[name]
                self.add("", cause, more)
        for (signal, cause), loss in self._losses.items():
            if loss.unsaid and self._is_due(loss):
                self._say(loss, signal, cause)

    def of_signals(self) -> dict[str, int]:
        """The points that a receiver refused, by what it said."""
        return {cause: loss.total for (signal, cause), loss in self._losses.items() if signal}

    def ended(self, name: str) -> int:
        """The cause of a counter is over: how many points it has cost since it began."""
        return self._losses.pop(("", self._causes[name].partition(": ")[0]), _Loss()).total

    def _is_due(self, loss: _Loss) -> bool:
        return loss.said_at is None or self._clock() - loss.said_at >= LOG_EVERY_S

    def _say(self, loss: _Loss, signal: str, cause: str) -> None:
        more = "" if loss.said_at is None else "more "
        count = f"1 {more}point is" if loss.unsaid == 1 else f"{loss.unsaid} {more}points are"
        log.warning("OTLP%s: %s dropped: %s.", f" {signal}" if signal else "", count, cause)
        loss.said_at, loss.unsaid = self._clock(), 0
