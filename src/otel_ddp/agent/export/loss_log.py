"""Says what is lost in the log: as it begins, every five minutes while it goes on, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

log = logging.getLogger("otel_ddp.agent")

LOG_EVERY_S = 300.0


@dataclass
class _Loss:
    """One cause by which points are lost."""

    said_at: float | None = None
    unsaid: int = 0
    total: int = 0


class LossLog:
    """Not locked: the delivery calls it under its own lock."""

    def __init__(self, clock: Callable[[], float], causes: Mapping[str, str]) -> None:
        """*causes*: the counters to watch, each with the words for its cause."""
        self._clock = clock
        self._causes = causes
        self._losses: dict[tuple[str, str], _Loss] = {}
        self._counted: dict[str, int] = {}

    def add(self, signal: str, cause: str, points: int, detail: str = "") -> None:
        """Points are lost now; the first ones of a cause are said at once."""
        # What stands behind the colon differs from one answer to the next.
        key = (signal, cause.partition(": ")[0])
        loss = self._losses.setdefault(key, _Loss())
        loss.unsaid += points
        loss.total += points
        if self._is_due(loss):
            self._say(loss, signal, cause, detail)

    def poll(self, counters: Mapping[str, int]) -> None:
        """Say what the counters have grown by, and what was not said yet of other losses."""
        for name, cause in self._causes.items():
            more = counters.get(name, 0) - self._counted.get(name, 0)
            if more:
                self._counted[name] = counters[name]
                self.add("", cause, more)
        for (signal, cause), loss in self._losses.items():
            if loss.unsaid and self._is_due(loss):
                self._say(loss, signal, cause, "")

    def ended(self, name: str) -> int:
        """The cause of a counter is over: how many points it has cost since it began."""
        return self._losses.pop(("", self._causes[name].partition(": ")[0]), _Loss()).total

    def _is_due(self, loss: _Loss) -> bool:
        return loss.said_at is None or self._clock() - loss.said_at >= LOG_EVERY_S

    def _say(self, loss: _Loss, signal: str, cause: str, detail: str) -> None:
        more = "" if loss.said_at is None else "more "
        count = f"1 {more}point is" if loss.unsaid == 1 else f"{loss.unsaid} {more}points are"
        log.warning(
            "OTLP%s: %s dropped: %s%s.",
            *(f" {signal}" if signal else "", count, cause, f" ({detail})" if detail else ""),
        )
        loss.said_at, loss.unsaid = self._clock(), 0
