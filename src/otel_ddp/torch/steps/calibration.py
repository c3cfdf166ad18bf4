"""How much longer our hooks keep a training thread than they see themselves."""

from __future__ import annotations

from collections import deque
from statistics import median

# In place, torch calls a hook, and it and the code after it find caches that the other one has
# filled. Before enough is known, and at most.
_BEFORE, _MOST = 1.5, 4.0
_EVERY, _KEPT = 8, 32


class Calibration:
    """Compares measured steps with the steps after them that were not, by the thread's clock."""

    def __init__(self) -> None:
        self.factor = _BEFORE
        """What a hook takes is this many times what it sees."""
        self._added = 0
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, measured_ns: int, bare_ns: int, seen_ns: float) -> None:
        """A measured step took so much of the thread, and the next one as much without hooks.

        *seen_ns*: what the hooks of the measured step say that they took.
        """
        self._pairs.append((measured_ns - bare_ns, seen_ns))
        self._added += 1
        if not self._added % _EVERY:
            more, seen = (median(each) for each in zip(*self._pairs, strict=True))
            # The standard error of that median, by the deviation of the others from it.
            deviation = median(abs(each - more) for each, _ in self._pairs)
            error = 1.86 * deviation / len(self._pairs) ** 0.5
            # On a busy machine steps differ by more than hooks take: that tells nothing of them.
            if error < seen:
                self.factor = min(max(more / seen, 1.0), _MOST)
