"""Step numbers, as hooks count them and as the user logs them, and the work of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from otel_ddp.journal import layout
from otel_ddp.journal.writer import scratch_words

# After this many backward passes without an optimizer step, the loop is taken to have no optimizer.
_MOST_ACCUMULATED = 64
_SHIFT = layout.CODE_SHIFT
_PHASE_WORD, _STEP_WORD = layout.PHASE // 8, layout.STEP // 8
_GC = layout.STEP_GC << _SHIFT
_RETRIES = layout.STEP_RETRIES << _SHIFT


class When(NamedTuple):
    """The step, epoch and time at which a value was logged."""

    step: int | None
    epoch: float | None
    time_ns: int


def _none() -> None:
    """Takes the place of a weak reference, so that no optimizer's steps are counted."""


class CountedSteps:
    """Counts a given number of steps without measuring them, at the least possible cost.

    Forward and backward passes evict the CPU caches, so each object that a hook touches is fetched
    from main memory. Counting touches only this object, and three journal words that must be right
    even if the process dies: the phase, the step, and the number of steps. `Progress.settle` writes
    the other words later, for many steps at once.
    """

    __slots__ = (
        *("_clock", "_left", "_longest_ns", "_optimizer", "_until_ns", "base", "ends", "place"),
        *("step", "store", "took_ns", "total", "words"),
    )

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # How many more steps to count; and a weak reference to the optimizer whose calls end them.
        # Its id would not do, as Python gives the ids of dead objects to new ones.
        self._left = 0
        self._optimizer: Callable[[], Any] = _none
        # Counting ends at a step longer than `_longest_ns`: so the current step must end by
        # `_until_ns`.
        self._longest_ns = self._until_ns = 0
        # When each counted step ended, for those that `settle` has not written yet.
        self.ends: list[int] = []
        # How long counting took in the last of the steps that `begin` asked for; 0 as long as it
        # goes on.
        self.took_ns = 0
        self.base = self.step = self.total = self.place = 0
        self.words = scratch_words()
        self.store = self.words.cast("B").cast("d")

    @property
    def ended_ns(self) -> int:
        """The end of the last counted step; before the first one, the time of `begin`."""
        return self._until_ns - self._longest_ns

    def begin(self, steps: int, optimizer: Callable[[], Any], longest_ns: int) -> None:
        """Start to count the next *steps* steps. Called at the end of a step."""
        self._left, self._longest_ns, self.took_ns = steps, longest_ns, 0
        self._until_ns = self._clock() + longest_ns
        # Set this last: `counts` counts a step as soon as the optimizer is known.
        self._optimizer = optimizer

    def stop(self) -> None:
        """Stop counting: the next step may differ from those before it. Thread-safe."""
        self._optimizer = _none

    def counts(self, optimizer: object) -> bool:
        """Count a step of this optimizer; False if the caller must handle the step itself."""
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


class StepNumbers:
    """The step numbers of a process: the hooks' count, and the numbers that the user logs.

    The attributes are plain, as they are used on the hot paths of hooks and `log`.
    """

    def __init__(self) -> None:
        # `last`: the last training step that was logged, or implied by a `log` call without a step.
        # `implied`: the last one that was implied. Both count from 0; -1 means none.
        self.last = self.implied = -1
        # Whether hooks count the steps.
        self.began = False
        self.in_step = False
        # Whether a model was called in this step. If not, a wait for data may be the end of an
        # epoch.
        self.model_called = False
        self.work = Work()
        # `count`: how many steps the hooks have counted, the same on all ranks. `logged_number`:
        # the number under which the user logs the last step, which may differ, and is known only on
        # ranks that log.
        self.count = self.logged_number = 0
        # The value of `last` when hooks detected the first step.
        self.before_first = -1
        # What `last` was when the previous step ended, and when the current step began.
        self.logged_before = self._before_step = -1
        # Values that an evaluation before any training logs without a step get their own numbers;
        # this is the last of these.
        self._evaluations = -1
        # Set only in unmeasured steps, in which the model has no hooks: a function that settles the
        # counted steps, and updates `model_called`.
        self.catch_up: Callable[[], None] | None = None
        # The counter of unmeasured steps, if there are hooks.
        self.counted: CountedSteps | None = None

    # -- for logged values

    def next(self, trains: bool) -> int:
        """The step of a `log` call without a step: the hooks' step; without hooks, each call for
        training is a new step."""
        if self.began:
            return self.of_values(trains)
        if trains:
            self.last += 1
            self.implied += 1
        elif self.last < 0:
            self._evaluations += 1
            return self._evaluations
        return self.last

    @property
    def have_ended(self) -> bool:
        """Whether any step has ended, as hooks count them; without hooks, as the user logs them."""
        return self.count > 0 if self.began else self.last >= 0

    def train(self, step: int) -> None:
        """Note that a training value was logged with this step."""
        if self.catch_up is not None:
            self.catch_up()
        # Ignore a lower number, which may be an epoch.
        self.last = max(self.last, step)
        if self.counted is not None:
            self.counted.step = self.next_logged()

    def of_values(self, trains: bool) -> int:
        """The step, as hooks count, of a value that is logged now without a step."""
        if self.catch_up is not None:
            self.catch_up()
        if not self.count and self.work.micro_batches > _MOST_ACCUMULATED:
            # No optimizer has been called for so long that the loop must update the weights without
            # one. So each backward pass counts as a step.
            return self.work.micro_batches
        if trains and self.model_called:
            return self.next_logged()
        return self.logged_number if self.last == self.logged_before else self.last

    def trace_and_step(self) -> tuple[str, int | None]:
        """The trace and the step of an event that happens now; empty before the first step.

        After a step has ended, the step is still that one, as people save and evaluate after a
        step. The trace is that of the next step, whose duration includes the time between the
        steps.
        """
        if self.began:
            # Make the trace from the hooks' count, which is the same on all ranks, even on those
            # that do not log.
            step = self.of_values(True)
            return layout.trace_of_step(self.count + 1), step
        return (layout.trace_of_step(self.last), self.last) if self.last >= 0 else ("", None)

    # -- for hooks

    def begin_step(self) -> None:
        """A step begins."""
        self.in_step = True
        if not self.began:
            self.began = True
            if self.last == self.implied:
                # The user has logged without step numbers so far. From here on, the hooks' count
                # takes the place of the numbers that were implied.
                self.last = self.logged_before = -1
            self.before_first = self.last
        self._before_step = self.last

    def next_logged(self) -> int:
        """The number under which the user will log the step that ends next."""
        logged = self.last
        if logged == self.logged_before:
            return self.logged_number + 1
        # A value logged within a step has the number of that step. A value logged between two steps
        # has the number of the earlier one, so the step that ends next gets the number after it.
        return logged if self.in_step and logged != self._before_step else logged + 1

    def resume_from(self, done: int) -> None:
        """Continue the numbers after *done* steps of earlier processes, unless the user has logged
        a number."""
        if not self.count and self.last < 0:
            self.logged_number = max(self.logged_number, done)


class Amounts(NamedTuple):
    """The work of a step, or of all steps so far."""

    samples: int
    tokens: int
    flops: float
    forwards: int
    micro_batches: int


class Work:
    """The work of all steps, added up on the training thread, and written at each flush."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.forwards = self.micro_batches = 0
        self.gc_ns = self.retries = 0
        self.hook_ns = 0
        self.flops = 0.0
        self.flops_method = ""
        # How much of the garbage collection time, and of the tokens or samples, has been written as
        # step words.
        self.gc_written_ns = self.written = 0

    def amounts(self) -> Amounts:
        """Samples, tokens, FLOPs and calls so far."""
        return Amounts(self.samples, self.tokens, self.flops, self.forwards, self.micro_batches)

    def add(self, more: Amounts) -> None:
        """Add work."""
        self.samples += more.samples
        self.tokens += more.tokens
        self.flops += more.flops
        self.forwards += more.forwards
        self.micro_batches += more.micro_batches

    def write_stops(self, pending: list[int]) -> None:
        """Append words for the garbage collections and allocator retries of the step that ends."""
        if self.gc_ns != self.gc_written_ns:
            pending.append(_GC | self.gc_ns - self.gc_written_ns)
            self.gc_written_ns = self.gc_ns
        if self.retries:
            pending.append(_RETRIES | self.retries)
            self.retries = 0
