"""How the delivery goes: counted, as a sentence for people, and in few lines of the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from otel_ddp.agent.export.otlp.outcome import SIGNALS, Outcome, Signal

log = logging.getLogger("otel_ddp.agent")

SAY_EVERY_S = 300.0


@dataclass(frozen=True)
class Facts:
    """How the delivery is doing, at one moment."""

    delivered: int
    """Requests that the collector took."""
    failed: int
    """Attempts that are worth repeating."""
    refused: int
    """Requests that the collector does not want."""
    rejected_points: int
    """Points the collector dropped out of requests that it took."""
    dropped_points: Mapping[str, int]
    """Points that are lost, by why: refused, memory_full, superseded, spool_full, spool_error,
    corrupt."""
    memory_bytes: int
    spool_bytes: int
    state: str


@dataclass
class _Way:
    """One signal's way to the collector."""

    used: bool = False
    why: str = ""
    """What is wrong; empty while all is well."""
    since_s: float = 0.0


class Report:
    """Not locked: whoever has one calls it under a lock of its own."""

    def __init__(
        self,
        destination: Callable[[], str],
        where_it_waits: Callable[[], str],
        disk_problem: Callable[[], str | None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._destination = destination
        self._where_it_waits = where_it_waits
        self._disk_problem = disk_problem
        self._clock = clock
        self._wall = wall
        self._ways: dict[Signal, _Way] = {signal: _Way() for signal in SIGNALS}
        self._counts: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._trouble_since: float | None = None
        self._said_at: float | None = None
        self._said_trouble = False
        self._said_rejected_at: float | None = None

    def note(self, signal: Signal, points: int, outcome: Outcome) -> None:
        """What became of one attempt."""
        way = self._ways[signal]
        way.used = True
        self._counts[outcome.kind] += 1
        if outcome.kind == "delivered":
            way.why = ""
            self._counts["rejected"] += outcome.rejected
            self._say_rejected(signal, outcome)
            self._say_end()
            return
        if not way.why:
            way.since_s = self._wall()
        way.why = outcome.why
        if outcome.kind == "refused":
            self.lost("refused", points)
        self._say_trouble(signal, outcome, points)

    def lost(self, why: str, points: int) -> None:
        """Points that nobody will get."""
        self._lost[why] += points

    def facts(self, *, lost: Mapping[str, int], memory_bytes: int, spool_bytes: int) -> Facts:
        """All of it; *lost* is what is lost elsewhere."""
        return Facts(
            delivered=self._counts["delivered"],
            failed=self._counts["retry"],
            refused=self._counts["refused"],
            rejected_points=self._counts["rejected"],
            dropped_points=dict(Counter(lost) + self._lost),
            memory_bytes=memory_bytes,
            spool_bytes=spool_bytes,
            state=self._state(),
        )

    def _state(self) -> str:
        troubled = [(signal, way) for signal, way in self._ways.items() if way.why]
        if not troubled:
            if not any(way.used for way in self._ways.values()):
                return f"nothing sent yet to {self._destination()}"
            return f"delivering to {self._destination()}"
        signal, way = troubled[0]
        since = time.strftime("%H:%M:%S", time.localtime(way.since_s))
        others_work = any(way.used and not way.why for way in self._ways.values())
        which = f"{signal}: " if others_work else ""
        return f"{which}{way.why} since {since}, {self._where_it_waits()}"

    # -- the log

    def _say_trouble(self, signal: Signal, outcome: Outcome, points: int) -> None:
        now = self._clock()
        if self._trouble_since is None:
            self._trouble_since = now
        if self._said_at is not None and now - self._said_at < SAY_EVERY_S:
            return
        self._said_at = now
        self._said_trouble = True
        if outcome.kind == "refused":
            text = f"{points} points of it are dropped, and so is what is refused from now on"
        elif problem := self._disk_problem():
            text = (
                f"what cannot be delivered waits in memory: the disk does not take it ({problem})"
            )
        else:
            text = "what cannot be delivered waits on disk"
        log.warning("OTLP %s: %s; %s.", signal, outcome.why, text)

    def _say_rejected(self, signal: Signal, outcome: Outcome) -> None:
        now, before = self._clock(), self._said_rejected_at
        if outcome.rejected and (before is None or now - before >= SAY_EVERY_S):
            self._said_rejected_at = now
            log.warning("OTLP %s: %s.", signal, outcome.why)

    def _say_end(self) -> None:
        if self._trouble_since is None or any(way.why for way in self._ways.values()):
            return
        lasted_s = self._clock() - self._trouble_since
        self._trouble_since = None
        if self._said_trouble:
            self._said_trouble = False
            log.warning(
                "OTLP: %s takes data again after %.0f s; %s.",
                self._destination(),
                lasted_s,
                self._where_it_waits(),
            )
