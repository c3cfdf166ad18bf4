"""Learns what a host needs for a step: its time in each phase, without what it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from otel_ddp.diagnosis.launch_need import LaunchNeed
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.words import WORK_PHASES

# What a host usually needs is the median of its first steps.
_BEGINS = 20
# From then on its usual time follows it this fast, and no pause moves it by more than this.
_FOLLOWS = 0.05
_FAR = 3.0
# So many steps in a row that are all further away are no pause: it takes what all of them take.
_STAYS = 10
# A loader that has batches ready hides how long it needs for one. What it has shown of that before
# counts for at least so many steps: equal loaders take thousands to change their places.
_SHOWN_STEPS = 10_000
# It follows this fast what the host waits, so that no loader is slow by chance.
_SHOWS = 0.02
# The loader is ahead of the host if this waits less than this part of what the loader has shown:
# all ranks go at one pace, so a shorter wait is a lead, and no faster loader.
_AHEAD = 0.95
# It has batches ready if the host waits less than this part. Then it may have shown what it needs
# in so many of the first steps alone: among many ranks equal loaders are soon ahead of the slowest.
_READY = 0.5
_SHOWN_IN = 4
# But not where first batches take longer than later ones, also on the rank that waits: by this.
_STARTS_SLOWLY = 1.5
# Whether a host waits for its device between steps is looked at this often, over so many steps.
_CHECK_EVERY = 10
_WAITS_STEPS = 60
# So much of the steps may be out of the ordinary.
_ODD = 0.1
# It waits if its time between steps varies so much less without the wait, and does not if it varies
# as much.
_CLEARLY_LESS = 0.6
# What varies by less than this does not vary.
_TICK_NS = 50_000
# The device has done all if what is left is less than a tick, or than one part in so many.
_DONE_PART = 64
_DATA = WORK_PHASES.index("data")
_OTHER = WORK_PHASES.index("other")


class HostNeed:
    """What the host of one rank usually needs."""

    def __init__(self) -> None:
        self._first_ns: list[tuple[int, ...]] = []
        self._last_first = 0
        self._usual_ns = [0.0] * len(WORK_PHASES)
        # By phase, how many of the last steps were far away in a row, and the least of them.
        self._far = [(0, 0)] * len(WORK_PHASES)
        # Of `other`, without waits for its device.
        self._alone_ns = 0.0
        self._steps = 0
        # The usual wait for a batch; the longest one in this block of steps and in the one before.
        self._load_ns = 0.0
        self._shown_ns = [0.0, 0.0]
        self._shown_first_ns = 0.0
        # Between steps: how long it took, and by how much the device was behind at the beginning.
        self._between_ns: deque[tuple[int, int]] = deque(maxlen=_WAITS_STEPS)
        self.waits: bool | None = None
        """Whether the host waits for its device between steps; None: that cannot be told yet."""
        self.launches = LaunchNeed()

    def begin(self, steps: Sequence[StepFacts]) -> None:
        """More steps of this rank, as soon as they are known: the first ones say how it began."""
        for facts in steps[: _BEGINS - len(self._first_ns)]:
            if facts.host_ns is None:
                continue
            self._first_ns.append(facts.host_ns)
            self.launches.follow(facts)
            self._last_first = facts.number
            self._usual_ns = [median(each) for each in zip(*self._first_ns, strict=True)]
            self._alone_ns = self._usual_ns[_OTHER]
            self._load_ns = self._shown_ns[0] = self._usual_ns[_DATA]
            loads_ns = sorted([each[_DATA] for each in self._first_ns])
            self._shown_first_ns = loads_ns[-min(_SHOWN_IN, len(loads_ns))]

    def follow(self, facts: StepFacts) -> None:
        """One more step that is compared with those of the other ranks."""
        if facts.number <= self._last_first:
            return
        self.launches.follow(facts)
        needed_ns = facts.host_ns or ()
        usual_ns = self._usual_ns
        for at, ns in enumerate(needed_ns):
            most_ns = _FAR * usual_ns[at] + 1
            usual_ns[at] += _FOLLOWS * (min(ns, most_ns) - usual_ns[at])
            if ns > most_ns:
                self._go_far(at, ns)
            elif self._far[at][0]:
                self._far[at] = (0, 0)
        self._steps += 1
        if self._steps % _SHOWN_STEPS == 0:
            self._shown_ns = [0.0, self._shown_ns[0]]
            self._shown_first_ns = 0.0
        most_ns = _FAR * self._load_ns + 1
        self._load_ns += _SHOWS * (min(needed_ns[_DATA], most_ns) - self._load_ns)
        self._shown_ns[0] = max(self._shown_ns[0], self._load_ns)
        if facts.behind_ns is None:
            return
        took_ns, behind_ns = needed_ns[_OTHER], facts.behind_ns
        alone_ns = max(took_ns - behind_ns, 0)
        self._alone_ns += _FOLLOWS * (min(alone_ns, _FAR * self._alone_ns + 1) - self._alone_ns)
        self._between_ns.append((took_ns, behind_ns))
        if self._steps % _CHECK_EVERY == 0:
            self.waits = _waits(self._between_ns, self.waits)

    def _go_far(self, at: int, ns: int) -> None:
        many, least_ns = self._far[at]
        many, least_ns = many + 1, min(ns, least_ns) if many else ns
        if many == _STAYS:
            self._usual_ns[at] = max(self._usual_ns[at], least_ns)
            many = 0
        self._far[at] = (many, least_ns)

    def usual_ns(self, others_wait: bool) -> list[float]:
        """What it needs for each phase, but for waits for its device between steps.

        *others_wait*: other hosts do, and mostly all of them run the same program.
        """
        if self.waits is False or not (self.waits or others_wait):
            return self._usual_ns
        return [self._alone_ns if at == _OTHER else ns for at, ns in enumerate(self._usual_ns)]

    @property
    def began_as_it_is(self) -> bool:
        """Whether its host waited for the first batches about as long as it does now."""
        return self._shown_first_ns <= _STARTS_SLOWLY * self._usual_ns[_DATA]

    def loads_ns(self, rank: HostNeed) -> float:
        """How long its host may have to wait for a batch once none is ready.

        Where some are, that may be as long as that of another *rank* does, if it has shown half of
        it.
        """
        usual_ns, shown_ns, theirs_ns = self._usual_ns[_DATA], max(self._shown_ns), rank.waits_ns
        most_ns = max(shown_ns, self._shown_first_ns if rank.began_as_it_is else 0)
        if usual_ns < _READY * most_ns:
            return max(most_ns, theirs_ns) if 2 * most_ns >= theirs_ns else most_ns
        return shown_ns if usual_ns < _AHEAD * shown_ns else usual_ns

    @property
    def waits_ns(self) -> float:
        """How long its host usually waits for a batch."""
        return self._usual_ns[_DATA]


def _waits(between_ns: deque[tuple[int, int]], before: bool | None) -> bool | None:
    """Whether the host waits for its device between steps, as `.item()` makes it.

    Then its device has done all by the end of that time, and the time is longer by as much as the
    device was behind. Other work takes as long whether or not the device is behind.
    """
    if len(between_ns) < _WAITS_STEPS:
        return before
    missed = sum(took < behind - behind // _DONE_PART - _TICK_NS for took, behind in between_ns)
    if missed > _ODD * len(between_ns):
        return False
    with_wait_ns = _spread_ns([took for took, _ in between_ns])
    alone_ns = _spread_ns([took - behind for took, behind in between_ns])
    if max(with_wait_ns, alone_ns) < _TICK_NS:
        # It takes changes to tell.
        return before
    if alone_ns < _CLEARLY_LESS * with_wait_ns:
        return True
    return before if alone_ns < with_wait_ns else False


def _spread_ns(values: list[int]) -> float:
    center = median(values)
    far = sorted([abs(each - center) for each in values])
    ordinary = far[: len(far) - round(_ODD * len(far))]
    return sum(ordinary) / len(ordinary)
