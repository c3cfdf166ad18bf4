"""Records the ends of steps that are only counted, at next to no price."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_ddp.journal import layout
from otel_ddp.journal.writer import scratch_words

_PHASE_WORD, _STEP_WORD = layout.PHASE // 8, layout.STEP // 8


def _none() -> None:
    """No optimizer's steps are counted."""


class CountedSteps:
    """Counts steps that are alike, up to one at whose end there is something to decide.

    Forward and backward have filled the caches, so a hook finds whatever it touches in main memory.
    This touches one object, and three words of the journal, which outlive the process: the phase,
    the step, and how many steps there were. `Progress.settle` writes the rest, for many at once.
    """

    __slots__ = (
        *("_clock", "_left", "_longest_ns", "_optimizer", "_until_ns", "base", "ends", "place"),
        *("step", "store", "took_ns", "total", "words"),
    )

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # How many steps are still to be counted, and of which optimizer, if that is still there: a
        # new one may have the id of one that is gone.
        self._left = 0
        self._optimizer: Callable[[], Any] = _none
        # A step is like the others if it takes no longer than this: up to then.
        self._longest_ns = self._until_ns = 0
        self.ends: list[int] = []
        """When the steps have ended of which the rest is not written yet."""
        self.took_ns = 0
        """What it took to count the last one of all; 0: it has not come."""
        self.base = self.step = self.total = self.place = 0
        self.words = scratch_words()
        self.store = self.words.cast("B").cast("d")

    @property
    def ended_ns(self) -> int:
        """When the last of these steps has ended, or the one before them."""
        return self._until_ns - self._longest_ns

    def begin(self, steps: int, optimizer: Callable[[], Any], longest_ns: int) -> None:
        """A step has ended, and so many are counted from here on."""
        self._left, self._longest_ns, self.took_ns = steps, longest_ns, 0
        self._until_ns = self._clock() + longest_ns
        # Last: from here on they are.
        self._optimizer = optimizer

    def stop(self) -> None:
        """Count no more: the next step may be unlike those before it. Any thread may say so."""
        self._optimizer = _none

    def counts(self, optimizer: object) -> bool:
        """An optimizer has made a step: whether it was counted, and nothing else is to be done."""
        left = self._left
        if not left or self._optimizer() is not optimizer:
            return False
        now = self._clock()
        if now > self._until_ns:
            return False
        self._until_ns = now + self._longest_ns
        self._left = left = left - 1
        self.ends.append(now)
        words = self.words
        words[_PHASE_WORD] = self.base + now
        words[_STEP_WORD] = self.step = self.step + 1
        self.store[self.place] = self.total = self.total + 1
        if not left:
            self.took_ns = self._clock() - now
        return True
