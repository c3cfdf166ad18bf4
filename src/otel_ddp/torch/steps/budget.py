"""Chooses the steps that are measured: as many as a share of the training thread's time pays for.

A token bucket. The thread's time fills it, what we do on the thread empties it, and a step is
measured only while it is not overdrawn. It holds a twentieth of what ten seconds may cost, and
fills at the rest of the share: so no ten seconds cost more than the share, plus the one measured
step that overdraws it.

Which steps: those whose hashed number is below a bound, one in `every`. The sets are nested for
powers of two, so ranks with different bounds still share steps, without a message. A fixed
distance would hit or miss the length of a user's loop.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_GOLDEN, _NUMBERS = 0x9E3779B97F4A7C15, 1 << 64
_WINDOW_NS = 10 * 10**9
_FILLS, _HOLDS = 0.95, 0.05
# What was spent longer ago than this counts less, where `every` is found.
_RECENT_NS = 4 * 10**9
_LARGEST = 1024
# `every` is halved where that would take less than this part of what flows in; and this often at
# most, for each change is written down.
_ROOM, _MOST_HALVINGS = 0.9, 100
# So many measured steps tell what one costs.
_ENOUGH = 16


def in_sample(number: int, every: int) -> bool:
    """Whether the step of this number is one of the one in *every* that all ranks measure."""
    return (number * _GOLDEN) % _NUMBERS < _NUMBERS // every


class Budget:
    """The bucket of one training thread. All times are nanoseconds, from its own clock."""

    def __init__(self, share: float) -> None:
        """*share*: of the thread's time, at most."""
        self._fills = share * _FILLS
        self._holds_ns = self._credit_ns = share * _HOLDS * _WINDOW_NS
        self.every = 1
        """One step in so many is measured."""
        self._halvings = 0
        self._since_measured_ns = 0.0
        self._forget()

    def _forget(self) -> None:
        """`every` has changed: add up anew what we have taken since."""
        self._elapsed_ns = self._spent_ns = self._on_measured_ns = 0.0
        self._measured = 0

    @property
    def allows(self) -> bool:
        """Whether a step may be measured now."""
        return self._credit_ns >= 0

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is measured that need not be."""
        return self._credit_ns <= -self._holds_ns

    @property
    def share(self) -> float:
        """What we have taken of the thread since `every` changed."""
        return self._spent_ns / self._elapsed_ns if self._elapsed_ns else 0.0

    def spend(self, took_ns: float, measured: bool) -> None:
        """We took so long of the thread. *measured*: to measure a step, else beside one."""
        # One step that costs very much is no reason to measure none for minutes.
        self._credit_ns = max(self._credit_ns - took_ns, -self._holds_ns)
        self._spent_ns += took_ns
        if measured:
            self._on_measured_ns += took_ns

    def step_ended(self, took_ns: float, measured: bool) -> None:
        """The step has ended after so long, our own work included."""
        self._credit_ns = min(self._credit_ns + took_ns * self._fills, self._holds_ns)
        self._since_measured_ns = 0 if measured else self._since_measured_ns + took_ns
        self._elapsed_ns += took_ns
        self._measured += measured
        if self._elapsed_ns > _RECENT_NS:
            self._elapsed_ns /= 2
            self._spent_ns /= 2
            self._on_measured_ns /= 2
        if self.every > 1 and self._credit_ns == self._holds_ns and self._measured >= _ENOUGH:
            # Twice as many steps would be measured.
            would_take_ns = self._spent_ns + self._on_measured_ns
            room_ns = self._elapsed_ns * self._fills * _ROOM
            if would_take_ns < room_ns and self._halvings < _MOST_HALVINGS:
                self._halvings += 1
                self._change(self.every // 2)

    def measures(self, number: int) -> bool:
        """Whether the step of this number, which begins, is measured."""
        if self._since_measured_ns >= _WINDOW_NS:
            return True
        if not in_sample(number, self.every):
            return False
        if self._credit_ns >= 0:
            return True
        # Ranks should leave out the same steps: so fewer are taken, unless this was a burst.
        if self._spent_ns > self._elapsed_ns * self._fills and self.every < _LARGEST:
            self._change(self.every * 2)
        return False

    def _change(self, every: int) -> None:
        self.every = every
        self._forget()


# -- how much longer our hooks keep a training thread than they see themselves

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
