"""The wall clock of this node beside its monotonic one: whether it was set, and by how much."""

from __future__ import annotations

import time
from collections.abc import Callable

# The two are read one after the other. Where that took longer than this, it says nothing.
_READ_WITHIN_NS = 10_000_000
# Below this it was not set: else the moments at which a rank entered its phase would move.
_SET_NS = 50_000_000


def _origin_ns() -> int | None:
    """When the monotonic clock was 0, by the wall clock; None: the reading was interrupted."""
    before_ns = time.monotonic_ns()
    wall_ns = time.time_ns()
    after_ns = time.monotonic_ns()
    within = after_ns - before_ns <= _READ_WITHIN_NS
    return wall_ns - (before_ns + after_ns) // 2 if within else None


class WallClock:
    """One an agent, made as it starts; `update` looks whether it was set."""

    def __init__(self, origin: Callable[[], int | None] = _origin_ns) -> None:
        self._read = origin
        first = origin()
        self._first_ns = time.time_ns() - time.monotonic_ns() if first is None else first
        self.origin_ns = self._first_ns
        """When the monotonic clock was 0, by the wall clock as it is set now."""

    def update(self) -> None:
        now_ns = self._read()
        if now_ns is not None and abs(now_ns - self.origin_ns) > _SET_NS:
            self.origin_ns = now_ns

    @property
    def set_by_ns(self) -> int:
        """How far it was set forward since the agent started."""
        return self.origin_ns - self._first_ns
