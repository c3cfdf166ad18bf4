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

import math
from collections import deque
from statistics import median

from otel_ddp.recording.progress import Progress
from otel_ddp.torch.steps.group_calls import GroupCalls
from otel_ddp.torch.steps.sampled import SampledSteps

_GOLDEN, _NUMBERS = 0x9E3779B97F4A7C15, 1 << 64
_WINDOW_NS = 10 * 10**9
_FILLS, _HOLDS = 0.95, 0.05
# What was spent longer ago than this counts less, where `every` is found.
_RECENT_NS = 4 * 10**9
_LARGEST = 1024
# `every` is halved where that would take less than this part of what flows in.
_ROOM = 0.9
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
        self._every = self._least = 1
        self._since_measured_ns = 0.0
        self._forget()

    def _forget(self) -> None:
        """`every` has changed: add up anew what we have taken since."""
        self._elapsed_ns = self._spent_ns = self._on_measured_ns = 0.0
        self._measured = 0

    @property
    def every(self) -> int:
        """One step in so many is measured."""
        return max(self._every, self._least)

    def measure_at_most_one_of(self, least: int) -> None:
        """A bound beside the cost. *least*: a power of two; halving it once changes nothing."""
        if least > self._least or 2 * least < self._least:
            self._least = least

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
        if self._every > 1 and self._credit_ns == self._holds_ns and self._measured >= _ENOUGH:
            # Twice as many steps would be measured.
            would_take_ns = self._spent_ns + self._on_measured_ns
            room_ns = self._elapsed_ns * self._fills * _ROOM
            if would_take_ns < room_ns:
                self._change(self._every // 2)

    def measures(self, number: int) -> bool:
        """Whether the step of this number, which begins, is measured."""
        if self._since_measured_ns >= _WINDOW_NS:
            return True
        if not in_sample(number, self.every):
            return False
        if self._credit_ns >= 0:
            return True
        # Ranks should leave out the same steps: so fewer are taken, unless this was a burst.
        if self._spent_ns > self._elapsed_ns * self._fills and self._every < _LARGEST:
            self._change(self._every * 2)
        return False

    def _change(self, every: int) -> None:
        self._every = every
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


# -- what is taken of the thread, and paid

# So many steps are measured at the beginning, whatever they cost: they show what a loop is made of.
_FIRST_STEPS = 64
# A step that took so many times as long as those before it is odd: the next one is measured.
ODD = 4
# If not all steps are measured, at most one of so many measured ones is sampled: that costs as
# much as measuring five.
_SAMPLED = 16
# How many steps are measured is recorded once that has not changed for so long, and not too often.
_SETTLED_NS, _MOST_REPORTS = 2 * 10**9, 100


class Cost:
    """Accounts for the thread time of our hooks and `log`, and decides which steps are measured."""

    def __init__(self, progress: Progress, sampled: SampledSteps, calls: GroupCalls) -> None:
        self._progress, self._sampled, self._calls = progress, sampled, calls
        self._steps, self._work = progress.steps, progress.work
        self._gate = progress.recorder.gate
        self.budget: Budget | None = None
        """None: each step is measured, whatever that takes."""
        self.every = 1
        self._calibration = Calibration()
        # End and number of the last step that was accounted for; the recent step time; when `every`
        # changed.
        self.ended_ns = self._looked_at = self.usual_ns = self._changed_ns = 0
        self._reports, self._reported = 0, False
        # Measured time of hooks and `log` that is not yet charged to the budget; and in this step.
        self._seen_ns = self._seen_in_step_ns = self._log_ns = 0
        # Whether the step that a hook has ended was measured; None: no hook has ended one.
        self._ended_measured: bool | None = None
        # Thread time at the end of the last step; thread time of the last measured step, and of its
        # hooks. 0: unknown.
        self._cpu_ns = self._measured_cpu_ns = self._measured_seen_ns = 0
        # Median cost of a hook that decides about the next step, and of one that only counts.
        self._decide_ns, self._count_ns = 10_000, 2_500

    def keep_to(self, share: float) -> None:
        """From now on take no more than this share of the thread's time."""
        if share < math.inf and self.budget is None:
            self.budget = Budget(share)
            self.ended_ns = self._changed_ns = self._progress.phases.clock()
            self._looked_at = self._steps.count

    def took(self, took_ns: int) -> None:
        """Add the time that a hook measured of itself."""
        self._work.hook_ns += took_ns
        self._seen_ns += took_ns

    def decided(self, took_ns: int) -> None:
        """As `took`, for a hook that has decided about the next step."""
        usual_ns = self._decide_ns
        self._decide_ns = _towards(usual_ns, took_ns)
        # What takes twice as long was interrupted.
        self.took(min(took_ns, 2 * usual_ns))

    def counted(self, took_ns: int) -> None:
        """The last one of the hooks that only count took so long."""
        self._count_ns = _towards(self._count_ns, took_ns)

    def step_ends(self, now: int, measured: bool) -> tuple[bool, bool]:
        """Whether the next step is one of those to be measured, and whether this one was odd."""
        budget, number = self.budget, self._steps.count + 1
        if budget is None:
            return True, False
        # All steps since the last one that was looked at, and this one.
        since_ns = now - self.ended_ns
        each_ns = since_ns // max(number - self._looked_at, 1)
        took_ns = now - max(self.ended_ns, self._progress.counted.ended_ns)
        self.took((number - 1 - self._looked_at) * self._count_ns)
        self.ended_ns, self._looked_at = now, number
        self._pay(budget, measured)
        if number < _FIRST_STEPS:
            self.usual_ns = took_ns
            return True, False
        usual_ns = self.usual_ns
        self.usual_ns = usual_ns + (min(each_ns, 2 * usual_ns) - usual_ns) // 16
        budget.step_ended(since_ns, measured)
        budget.measure_at_most_one_of(self._calls.least_every(self.usual_ns))
        measures = budget.measures(number + 1)
        if budget.every != self.every:
            self.every, self._changed_ns, self._reported = budget.every, now, False
            self._progress.flush_rarely(budget.every > 1)
            self._sampled.at_most_one_of(_SAMPLED * budget.every if budget.every > 1 else 1)
        return measures, took_ns > ODD * usual_ns

    def _pay(self, budget: Budget, measured: bool) -> None:
        """Charge hooks and `log` to the token bucket. The first steps are free."""
        seen_ns, self._seen_ns = self._seen_ns, 0
        took_ns = int(seen_ns * self._calibration.factor)
        if measured:
            self._seen_in_step_ns += seen_ns
        if (log_ns := self._gate.log_ns) != self._log_ns:
            log_ns, self._log_ns = max(log_ns - self._log_ns, 0), log_ns
            took_ns += log_ns
        self._work.hook_ns += took_ns - seen_ns
        if self._steps.count > _FIRST_STEPS:
            budget.spend(took_ns, measured)

    @property
    def compares(self) -> bool:
        """Whether this step, if it is not measured, is compared with the one before it."""
        return self._measured_cpu_ns > 0

    def step_ended(self, measured: bool) -> None:
        """A hook has ended a step, and is not done yet."""
        self._ended_measured = measured

    def hook_done(self, cpu_ns: int) -> None:
        """A hook is done, at this time of its thread's clock."""
        measured, self._ended_measured = self._ended_measured, None
        if measured is not None and self.budget is not None:
            if measured:
                self._pay(self.budget, measured)
            self.step_over(cpu_ns, measured)

    def step_over(self, cpu_ns: int, measured: bool = False) -> None:
        """The hook that has ended a step is done."""
        before_ns, self._cpu_ns = self._cpu_ns, cpu_ns
        took_ns = cpu_ns - before_ns if before_ns else 0
        if measured:
            self._measured_cpu_ns, self._measured_seen_ns = took_ns, self._seen_in_step_ns
        elif self._measured_cpu_ns:
            if took_ns:
                self._calibration.add(self._measured_cpu_ns, took_ns, self._measured_seen_ns)
            self._measured_cpu_ns = 0
        self._seen_in_step_ns = 0

    def report(self, now: int) -> None:
        """Record how many steps are measured, once that has settled, and what it takes."""
        budget = self.budget
        if self._reported or self._reports >= _MOST_REPORTS or self._steps.count <= _FIRST_STEPS:
            return
        if budget is not None and now - self._changed_ns < _SETTLED_NS:
            return
        self._reported = True
        self._reports += 1
        found: dict[str, float] = {"one_of": self.every}
        if budget is not None:
            found["share"] = round(budget.share, 6)
        self._progress.recorder.documents.facts({"measuring": found})


def _towards(median_ns: int, found_ns: int) -> int:
    """A median after one more value."""
    return median_ns + (250 if found_ns > median_ns else -250)
