"""Learns what a host needs for a step: its time in each phase, without what it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES

_DATA = WORK_PHASES.index("data")
_OTHER = WORK_PHASES.index("other")
_COMPUTE = [WORK_PHASES.index(word) for word in COMPUTE_PHASES]


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
        self._between_ns: deque[tuple[int, int]] = deque(maxlen=limits.NEED_WAITS_STEPS)
        self.waits: bool | None = None
        """Whether the host waits for its device between steps; None: that cannot be told yet."""
        self.launches = LaunchNeed()

    def begin(self, steps: Sequence[StepFacts]) -> None:
        """More steps of this rank, as soon as they are known: the first ones say how it began."""
        for facts in steps[: limits.NEED_BEGINS - len(self._first_ns)]:
            if facts.host_ns is None:
                continue
            self._first_ns.append(facts.host_ns)
            self.launches.follow(facts)
            self._last_first = facts.number
            self._usual_ns = [median(each) for each in zip(*self._first_ns, strict=True)]
            self._alone_ns = self._usual_ns[_OTHER]
            self._load_ns = self._shown_ns[0] = self._usual_ns[_DATA]
            loads_ns = sorted([each[_DATA] for each in self._first_ns])
            self._shown_first_ns = loads_ns[-min(limits.NEED_SHOWN_IN, len(loads_ns))]

    def follow(self, facts: StepFacts) -> None:
        """One more step that is compared with those of the other ranks."""
        if facts.number <= self._last_first:
            return
        self.launches.follow(facts)
        needed_ns = facts.host_ns or ()
        usual_ns = self._usual_ns
        for at, ns in enumerate(needed_ns):
            most_ns = limits.NEED_FAR * usual_ns[at] + 1
            usual_ns[at] += limits.NEED_FOLLOWS * (min(ns, most_ns) - usual_ns[at])
            if ns > most_ns:
                self._go_far(at, ns)
            elif self._far[at][0]:
                self._far[at] = (0, 0)
        self._steps += 1
        if self._steps % limits.NEED_SHOWN_STEPS == 0:
            self._shown_ns = [0.0, self._shown_ns[0]]
            self._shown_first_ns = 0.0
        most_ns = limits.NEED_FAR * self._load_ns + 1
        self._load_ns += limits.NEED_SHOWS * (min(needed_ns[_DATA], most_ns) - self._load_ns)
        self._shown_ns[0] = max(self._shown_ns[0], self._load_ns)
        if facts.behind_ns is None:
            return
        took_ns, behind_ns = needed_ns[_OTHER], facts.behind_ns
        alone_ns = max(took_ns - behind_ns, 0)
        self._alone_ns += limits.NEED_FOLLOWS * (
            min(alone_ns, limits.NEED_FAR * self._alone_ns + 1) - self._alone_ns
        )
        self._between_ns.append((took_ns, behind_ns))
        if self._steps % limits.NEED_CHECK_EVERY == 0:
            self.waits = _waits(self._between_ns, self.waits)

    def _go_far(self, at: int, ns: int) -> None:
        many, least_ns = self._far[at]
        many, least_ns = many + 1, min(ns, least_ns) if many else ns
        if many == limits.NEED_STAYS:
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
        return self._shown_first_ns <= limits.NEED_STARTS_SLOWLY * self._usual_ns[_DATA]

    def loads_ns(self, rank: HostNeed) -> float:
        """How long its host may have to wait for a batch once none is ready.

        Where some are, that may be as long as that of another *rank* does, if it has shown half of
        it.
        """
        usual_ns, shown_ns, theirs_ns = self._usual_ns[_DATA], max(self._shown_ns), rank.waits_ns
        most_ns = max(shown_ns, self._shown_first_ns if rank.began_as_it_is else 0)
        if usual_ns < limits.NEED_READY * most_ns:
            return max(most_ns, theirs_ns) if 2 * most_ns >= theirs_ns else most_ns
        return shown_ns if usual_ns < limits.NEED_AHEAD * shown_ns else usual_ns

    @property
    def waits_ns(self) -> float:
        """How long its host usually waits for a batch."""
        return self._usual_ns[_DATA]


def _waits(between_ns: deque[tuple[int, int]], before: bool | None) -> bool | None:
    """Whether the host waits for its device between steps, as `.item()` makes it.

    Then its device has done all by the end of that time, and the time is longer by as much as the
    device was behind. Other work takes as long whether or not the device is behind.
    """
    if len(between_ns) < limits.NEED_WAITS_STEPS:
        return before
    missed = sum(
        took < behind - behind // limits.NEED_DONE_PART - limits.NEED_TICK_NS
        for took, behind in between_ns
    )
    if missed > limits.NEED_ODD * len(between_ns):
        return False
    with_wait_ns = _spread_ns([took for took, _ in between_ns])
    alone_ns = _spread_ns([took - behind for took, behind in between_ns])
    if max(with_wait_ns, alone_ns) < limits.NEED_TICK_NS:
        # It takes changes to tell.
        return before
    if alone_ns < limits.NEED_CLEARLY_LESS * with_wait_ns:
        return True
    return before if alone_ns < with_wait_ns else False


def _spread_ns(values: list[int]) -> float:
    center = median(values)
    far = sorted([abs(each - center) for each in values])
    ordinary = far[: len(far) - round(limits.NEED_ODD * len(far))]
    return sum(ordinary) / len(ordinary)


class LaunchNeed:
    """One per rank whose device's clock is known.

    A host that is ahead of its device waits for a place in the queue, so its time in forward says
    nothing of its own pace. Now and then it is not ahead: in its first steps, or after a pause.
    """

    def __init__(self) -> None:
        self._steps = 0
        # The number of the step since the beginning, and how long the host took to launch it.
        self._shown: deque[tuple[int, int]] = deque(maxlen=limits.LAUNCH_MOST)

    def follow(self, facts: StepFacts) -> None:
        """One more step."""
        if facts.paced_ns is None or facts.host_ns is None:
            return
        self._steps += 1
        took_ns = sum(map(facts.phases_ns.__getitem__, _COMPUTE))
        if 0 < limits.LAUNCH_KEEPS_UP * took_ns <= sum(map(facts.paced_ns.__getitem__, _COMPUTE)):
            self._shown.append((self._steps, sum(map(facts.host_ns.__getitem__, _COMPUTE))))

    def usual_ns(self, step_ns: float) -> float:
        """What it needs, where a step takes this long now; 0 where that is not known."""
        while self._shown and self._steps - self._shown[0][0] > limits.LAUNCH_SHOWN_STEPS:
            self._shown.popleft()
        if len(self._shown) < limits.LAUNCH_FEWEST:
            return 0.0
        usual_ns = median([ns for _, ns in self._shown])
        return usual_ns if usual_ns <= limits.LAUNCH_OUTDATED * step_ns else 0.0
