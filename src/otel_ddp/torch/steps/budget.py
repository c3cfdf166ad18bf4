"""Chooses the measured steps, so that our hooks take at most a share of the training thread's time.

A token bucket: the thread's time fills it, our work on the thread empties it, and a step is
measured only if the bucket is not overdrawn. It holds 5 % of the cost allowed in ten seconds, and
fills at 95 % of the share. So the cost of any ten seconds is within the share, except for the one
step that overdraws the bucket. If counting and `log` alone take more than 85 % of the share, a
tenth of the share may come on top.

One step in `every` is measured: the steps whose hashed number is below a bound. `every` is a power
of two, so the steps of a larger `every` are also among those of a smaller one: ranks measure common
steps without exchanging messages. Steps at a fixed stride could coincide with the period of a
user's loop.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from otel_ddp import errors
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.steps.group_calls import GroupCalls

_GOLDEN, _NUMBERS = 0x9E3779B97F4A7C15, 1 << 64
_WINDOW_NS = 10 * 10**9
_REFILL, _CAPACITY = 0.95, 0.05
# Old steps lose weight: sums over all steps are halved once they cover more than this time, sums
# over measured steps once they cover more than this number of steps.
_RECENT_NS, _RECENT = 4 * 10**9, 64
_LARGEST = 1024
# Hysteresis: lower `every` only if the cost would stay below this part of the refill.
_ROOM = 0.75
# Part of the refill that is left for measured steps even if counting and `log` alone take more than
# the share: otherwise nothing would be known of such runs.
_RESERVED = 0.1
# From this many measured steps on, their mean cost may change `every` by itself.
_ENOUGH = 16
# A step's cost is limited to this many times the mean cost. Sampled steps cost about five times the
# mean; a step that seems to cost far more was interrupted.
_MOST_TIMES = 8


def in_sample(number: int, every: int) -> bool:
    """Whether step *number* is among the steps that all ranks with this *every* measure."""
    return (number * _GOLDEN) % _NUMBERS < _NUMBERS // every


class Budget:
    """The bucket of one training thread. All times are in nanoseconds of the thread's clock."""

    def __init__(self, share: float) -> None:
        """*share*: the largest share of the thread's time."""
        self._refill = share * _REFILL
        self._capacity_ns = self._credit_ns = share * _CAPACITY * _WINDOW_NS
        self._every = self._least = 1
        # Our time in unmeasured steps that the bucket has not paid for yet.
        self._owed_ns = self._since_measured_ns = 0.0
        # Decayed sums over all steps: their time, their number, and our time in unmeasured ones.
        self._elapsed_ns = self._steps = self._beside_ns = 0.0
        # Decayed sums over measured steps: our time, and the number of steps. The third value is
        # our time in the current step.
        self._cost_ns = self._measured = self._in_step_ns = 0.0

    @property
    def every(self) -> int:
        """One step in this many is measured."""
        return max(self._every, self._least)

    def measure_at_most_one_of(self, least: int) -> None:
        """Set the lower limit of `every`, a power of two. Hysteresis: a lower *least* is used only
        if it is a quarter of the last one or less."""
        if least > self._least or 2 * least < self._least:
            self._least = least

    @property
    def allows(self) -> bool:
        """Whether the bucket is not overdrawn, so that another step may be measured."""
        return self._credit_ns >= 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the bucket's debt is at its limit: then evaluations are not measured, either."""
        return self._credit_ns <= -self._capacity_ns

    @property
    def share(self) -> float:
        """The share of the thread's time that our work takes at the current `every`."""
        if not self._elapsed_ns:
            return 0.0
        return (self._beside_ns + self._each_ns * self._steps / self.every) / self._elapsed_ns

    @property
    def _each_ns(self) -> float:
        """The mean cost of a measured step."""
        return self._cost_ns / self._measured if self._measured else 0.0

    def spend(self, took_ns: float, measured: bool) -> None:
        """Charge our time on the thread to the bucket. *measured*: in a measured step."""
        # Debts are bounded, as one very expensive step must not disable measuring for minutes.
        if measured:
            self._credit_ns = max(self._credit_ns - took_ns, -self._capacity_ns)
            self._in_step_ns += took_ns
        else:
            self._owed_ns = min(self._owed_ns + took_ns, self._capacity_ns)
            self._beside_ns += took_ns

    def forgive(self) -> None:
        """Fill the bucket: forget the cost of earlier steps."""
        self._credit_ns = self._capacity_ns

    def step_ended(self, took_ns: float, measured: bool, steps: int = 1) -> None:
        """A step has ended. *took_ns*: its duration, including our work. *steps*: 1, plus the steps
        before it that were only counted."""
        filled_ns = took_ns * self._refill
        paid_ns = min(self._owed_ns, max(self._credit_ns, 0) + filled_ns * (1 - _RESERVED))
        self._owed_ns -= paid_ns
        self._credit_ns = min(self._credit_ns + filled_ns - paid_ns, self._capacity_ns)
        self._since_measured_ns = 0 if measured else self._since_measured_ns + took_ns
        self._elapsed_ns += took_ns
        self._steps += steps
        if self._elapsed_ns > _RECENT_NS:
            self._elapsed_ns /= 2
            self._steps /= 2
            self._beside_ns /= 2
        if measured:
            self._measured_step_ended()
        if self._every > 1 and self._credit_ns == self._capacity_ns and self._measured >= _ENOUGH:
            self._every = min(self._every, self._needed(_ROOM))

    def _measured_step_ended(self) -> None:
        took_ns, self._in_step_ns = self._in_step_ns, 0.0
        if self._cost_ns:
            took_ns = min(took_ns, _MOST_TIMES * self._each_ns)
        self._cost_ns += took_ns
        self._measured += 1
        if self._measured > _RECENT:
            self._cost_ns /= 2
            self._measured /= 2
        if self._measured >= _ENOUGH:
            # The bucket forgets costs beyond its largest debt: also raise `every` by the mean cost.
            self._every = max(self._every, self._needed(1.0))

    def _needed(self, room: float) -> int:
        """The least power of two for `every` at which our cost is at most *room* of the refill."""
        left_ns = self._elapsed_ns * self._refill * room
        left_ns = max(left_ns - self._beside_ns, left_ns * _RESERVED, 1)
        needed = math.ceil(self._each_ns * self._steps / left_ns)
        return min(1 << max(needed - 1, 0).bit_length(), _LARGEST)

    def measures(self, number: int) -> bool:
        """Whether to measure step *number*, which is about to begin."""
        if self._since_measured_ns >= _WINDOW_NS:
            return True
        if not in_sample(number, self.every):
            return False
        if self._credit_ns >= 0:
            return True
        # This step is skipped for lack of credit, but other ranks may measure it. So that ranks
        # skip the same steps, raise `every`, unless only a single burst caused the debt.
        self._every = max(self._every, self._needed(1.0))
        return False


# -- how much longer hooks delay a training thread than their own time measurement shows

# The initial and the largest factor. It is above 1: a hook's own measurement misses torch's call of
# the hook, and hook and training evict each other's data from CPU caches.
_BEFORE, _MOST = 1.5, 4.0
# Compute the factor again after this many comparisons, from this many of the latest ones.
_EVERY, _KEPT = 8, 32


class Calibration:
    """Compares the thread time of measured steps with that of the unmeasured steps after them."""

    def __init__(self) -> None:
        # The true cost of hooks, divided by the time that they measure themselves.
        self.factor = _BEFORE
        self._added = 0
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, measured_ns: int, bare_ns: int, seen_ns: float) -> None:
        """Compare the thread time of a measured step with that of the next one, without hooks.

        *seen_ns*: the sum of the times that the measured step's hooks took, by their own clock.
        """
        self._pairs.append((measured_ns - bare_ns, seen_ns))
        self._added += 1
        if not self._added % _EVERY:
            more, seen = (median(each) for each in zip(*self._pairs, strict=True))
            # The standard error of the median, from the median absolute deviation.
            deviation = median(abs(each - more) for each, _ in self._pairs)
            error = 1.86 * deviation / len(self._pairs) ** 0.5
            # Otherwise keep the factor: on a busy machine steps differ by more than hooks cost.
            if error < seen:
                self.factor = min(max(more / seen, 1.0), _MOST)


# -- sampled steps, in which slower values are read, too

_FAILURES_ALLOWED = 3
_NEVER = 2**63
# The first sampled step comes within this many steps: among the `_FIRST_STEPS`, all measured.
_FIRST_WITHIN = 32
# Collectives are counted in these steps: in some before the first verdict, then periodically. The
# numbers are not round, as loops may have an unusual collective in every tenth or hundredth step.
_COUNTED = (5, 11, 23, 47, 71)
_THEN_EVERY = 101


class SampledSteps:
    """Chooses the sampled steps, in which slower values are read, and the steps in which
    collectives are counted."""

    readings: Any
    """The `Readings`; set before the first hook is called."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._every, self._rarely = 100, 1
        self._counted = itertools.chain(_COUNTED, itertools.count(_THEN_EVERY, _THEN_EVERY))
        # The next measured step with at least the number `_sample_at` is sampled. In the next one
        # with at least the number `_count_at`, collectives are counted.
        self._sample_at, self._count_at = _NEVER, next(self._counted)
        # Whether the current step is sampled; and whether collectives are counted in it.
        self.sampling = self.counting = False
        # Whether to request the loss at the end of the next forward.
        self.wants_loss = False
        # Whether to read the requested loss when the next backward begins.
        self.wants_backward = False
        self._after_step: Callable[[], None] | None = None
        # `begin` has something to do at the start of this step, and not before.
        self.next_change = 0

    def sample_every(self, every: int) -> None:
        """Sample one step in *every*; 0: none."""
        self._every, self._sample_at = every, 0 if every > 0 else _NEVER
        self.next_change = 0

    def at_most_one_of(self, steps: int) -> None:
        """Sample at most one step in *steps*, from the next sampled step on."""
        self._rarely = steps

    def call_after_steps(self, act: Callable[[], None] | None) -> None:
        """Call *act* after each step; None: stop. This method may be called in any thread."""
        self._after_step = act
        # Assign this last: `begin`, in another thread, assigns `next_change` before it reads
        # `_after_step`. So `begin` either reads the new function or is called again.
        self.next_change = 0

    @property
    def acts_after_steps(self) -> bool:
        """Whether a function is called after each step; then each step must be measured."""
        return self._after_step is not None

    def begin(self, following: int, measured: bool = True) -> None:
        """Step number *following* begins. *measured*: whether its phases are measured."""
        counting = measured and following >= self._count_at
        if self.counting:
            self.run(self.readings.counted_step_ended)
        if counting:
            self._count_at = next(step for step in self._counted if step > following)
            self.run(self.readings.counted_step_begins)
        every = self._every
        if not self._sample_at:
            # Take the first sample soon, as its cost influences which later steps are measured.
            self._sample_at = following + min(-following % every, _FIRST_WITHIN)
        self.sampling = measured and following >= self._sample_at
        if self.sampling:
            # Round the distance up to a multiple of `every`: then ranks that sample less often
            # still sample some of the other ranks' sampled steps.
            after = every * -(-self._rarely // every)
            self._sample_at = following + after - following % every
        self.counting = counting
        self.next_change = min(self._sample_at, self._count_at)
        if self.sampling or counting:
            self.next_change = following + 1
        if (act := self._after_step) is not None:
            self.next_change = following + 1
            self.run(act)

    def run(self, act: Callable[..., None], *args: Any) -> None:
        """Run a function that is not called in every step, and contain its exceptions.

        After three failures it is never called again; steps are still measured.
        """
        name = act.__name__
        failures = self._failures.get(name, 0)
        if failures >= _FAILURES_ALLOWED:
            return
        try:
            act(*args)
        except errors.ANY_ERROR:
            errors.record_failure(name)
            self._failures[name] = failures + 1


# -- accounting

# The first so many steps are measured, whatever the cost, as they show the structure of the loop.
_FIRST_STEPS = 64
# The mean cost of measured steps is computed from this step on, as earlier ones are not typical.
_LEARN_FROM = 32
# A step that took this many times the usual time is odd: measure the next one.
ODD = 4
# If not all steps are measured, sample at most one in this many measured steps, as a sampled step
# costs about five times as much.
_SAMPLED = 16
# Record a new sampling rate once it was stable for this time; and at most this many rates per run.
_SETTLED_NS, _MOST_REPORTS = 2 * 10**9, 100


class Cost:
    """Accounts for the thread time of hooks and `log`, and decides which steps are measured."""

    def __init__(self, progress: Progress, sampled: SampledSteps, calls: GroupCalls) -> None:
        self._progress, self._sampled, self._calls = progress, sampled, calls
        self._steps, self._work = progress.steps, progress.work
        self._gate = progress.recorder.gate
        # None if our cost is not limited: then all steps are measured.
        self.budget: Budget | None = None
        self.every = 1
        self._calibration = Calibration()
        # When the last step ended that `step_ends` has accounted for, and the step's number; the
        # moving average of step times; and when `every` last changed.
        self.ended_ns = self._looked_at = self.usual_ns = self._changed_ns = 0
        self._reports, self._reported = 0, False
        # How long hooks took, not charged yet; how long the hooks of this step took; and how much
        # time of `log` has been charged so far.
        self._seen_ns = self._seen_in_step_ns = self._log_ns = 0
        # Whether the step that the current hook call ended was measured; None: it ended no step.
        self._ended_measured: bool | None = None
        # For the calibration, in thread time: when the last step ended; how long the last measured
        # step took; and how long its hooks took. 0: unknown.
        self._cpu_ns = self._measured_cpu_ns = self._measured_seen_ns = 0
        # Running medians of how long the post-step hook takes: if it decides whether to measure the
        # next step; and if it only counts the step.
        self._decide_ns, self._count_ns = 10_000, 2_500

    def keep_to(self, share: float) -> None:
        """Limit our cost to this share of the thread's time from now on."""
        if share < math.inf and self.budget is None:
            self.budget = Budget(share)
            self.ended_ns = self._changed_ns = self._progress.phases.clock()
            self._looked_at = self._steps.count

    def took(self, took_ns: int) -> None:
        """Add the time that a hook took, as measured by itself."""
        self._work.hook_ns += took_ns
        self._seen_ns += took_ns

    def decided(self, took_ns: int) -> None:
        """Like `took`, for a hook that decided whether to measure the next step."""
        usual_ns = self._decide_ns
        self._decide_ns = _towards(usual_ns, took_ns)
        # Limit the time: it is wall time, so a hook that took much longer was interrupted.
        self.took(min(took_ns, 2 * usual_ns))

    def counted(self, took_ns: int) -> None:
        """A hook that only counted a step took this long."""
        self._count_ns = _towards(self._count_ns, took_ns)

    def step_ends(self, now: int, measured: bool) -> tuple[bool, bool]:
        """Whether the next step is to be measured, and whether this one took unusually long."""
        budget, number = self.budget, self._steps.count + 1
        if budget is None:
            return True, False
        # Time and steps since the last call: this step, and earlier ones that were only counted.
        since_ns = now - self.ended_ns
        steps = max(number - self._looked_at, 1)
        each_ns = since_ns // steps
        took_ns = now - max(self.ended_ns, self._progress.counted.ended_ns)
        self.took((number - 1 - self._looked_at) * self._count_ns)
        self.ended_ns, self._looked_at = now, number
        self._pay(budget, measured)
        if number < _FIRST_STEPS:
            self.usual_ns = took_ns
            if number >= _LEARN_FROM:
                budget.step_ended(since_ns, measured)
                budget.forgive()
            return True, False
        usual_ns = self.usual_ns
        self.usual_ns = usual_ns + (min(each_ns, 2 * usual_ns) - usual_ns) // 16
        budget.step_ended(since_ns, measured, steps)
        budget.measure_at_most_one_of(self._calls.least_every(self.usual_ns))
        measures = budget.measures(number + 1)
        if budget.every != self.every:
            self.every, self._changed_ns, self._reported = budget.every, now, False
            self._progress.flush_rarely(budget.every > 1)
            self._sampled.at_most_one_of(_SAMPLED * budget.every if budget.every > 1 else 1)
        return measures, took_ns > ODD * usual_ns

    def _pay(self, budget: Budget, measured: bool) -> None:
        """Charge the time of hooks and of `log` to the token bucket."""
        seen_ns, self._seen_ns = self._seen_ns, 0
        took_ns = int(seen_ns * self._calibration.factor)
        if measured:
            self._seen_in_step_ns += seen_ns
        if (log_ns := self._gate.log_ns) != self._log_ns:
            log_ns, self._log_ns = max(log_ns - self._log_ns, 0), log_ns
            took_ns += log_ns
        self._work.hook_ns += took_ns - seen_ns
        if self._steps.count + 1 >= _LEARN_FROM:
            budget.spend(took_ns, measured)

    @property
    def compares(self) -> bool:
        """Whether this step, if unmeasured, is compared with the measured step before it."""
        return self._measured_cpu_ns > 0

    def step_ended(self, measured: bool) -> None:
        """The current hook has ended a step."""
        self._ended_measured = measured

    def hook_done(self, cpu_ns: int) -> None:
        """A hook call is over; *cpu_ns* is the thread time now."""
        measured, self._ended_measured = self._ended_measured, None
        if measured is not None and self.budget is not None:
            if measured:
                self._pay(self.budget, measured)
            self.step_over(cpu_ns, measured)

    def step_over(self, cpu_ns: int, measured: bool = False) -> None:
        """The hook call that ended a step is over; *cpu_ns* is the thread time now."""
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
        """Record the sampling rate and its cost, once the rate is stable."""
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
    """A running median, moved a fixed amount towards a new value."""
    return median_ns + (250 if found_ns > median_ns else -250)
