"""When to try again what has failed."""

from __future__ import annotations

import random
from collections.abc import Callable


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
