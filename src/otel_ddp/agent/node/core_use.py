"""Reads how long each rank has waited for a core: what the kernel's scheduler tells."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.reading.journals import Rank

_EVERY_NS = 2_000_000_000
# The rate is over so many of the last readings.
_KEPT = 16


class CoreUse:
    """One per node. Only the agent's loop calls it: one small file for each rank."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._read_ns = 0
        # When, and how long the main thread has waited so far, by process.
        self._waits_ns: dict[tuple[Labels, int, int], deque[tuple[int, int]]] = {}

    def poll(self, ranks: Iterable[Rank], now_ns: int) -> None:
        """Read those of these ranks; the others have ended."""
        if now_ns - self._read_ns < _EVERY_NS:
            return
        self._read_ns = now_ns
        before, self._waits_ns = self._waits_ns, {}
        for rank in ranks:
            waited_ns = self._waited_ns(rank.pid)
            if waited_ns is not None:
                key = rank.labels, rank.pid, rank.start_ticks
                points = self._waits_ns[key] = before.get(key, deque(maxlen=_KEPT))
                points.append((now_ns, waited_ns))

    def _waited_ns(self, pid: int) -> int | None:
        """For how long the main thread, which trains, was ready to run and had no core."""
        try:
            return int((self._proc / str(pid) / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            # A kernel without it, another PID namespace, or a process that has just ended.
            return None

    def waits(self) -> dict[Labels, float]:
        """By rank: seconds for which it waited for a core, in each second of late."""
        found = {}
        for (labels, _, _), points in self._waits_ns.items():
            (first_ns, first), (last_ns, last) = points[0], points[-1]
            if last_ns > first_ns:
                found[labels] = (last - first) / (last_ns - first_ns)
        return found
