"""The numbers of steps, as hooks and as the user count them, and their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from otel_ddp.journal import layout
from otel_ddp.journal.writer import scratch_words

# After so many backwards without a step of an optimizer, none is expected.
_MOST_ACCUMULATED = 64
_SHIFT = layout.CODE_SHIFT
_PHASE_WORD, _STEP_WORD = layout.PHASE // 8, layout.STEP // 8
_GC = layout.STEP_GC << _SHIFT
_RETRIES = layout.STEP_RETRIES << _SHIFT


class When(NamedTuple):
    """When a value was logged."""

    step: int | None
    epoch: float | None
    time_ns: int


def _none() -> None:
    """No optimizer's steps are counted."""


class CountedSteps:
    """Counts unmeasured steps, up to one at whose end there is a decision.

    Forward and backward evict the caches, so each object a hook touches is fetched from memory.
    This touches one object, and three words of the journal that must outlive the process: the
    phase, the step, and the number of steps. `Progress.settle` writes the rest for many steps at
    once.
    """

    __slots__ = (
        *("_clock", "_left", "_longest_ns", "_optimizer", "_until_ns", "base", "ends", "place"),
        *("step", "store", "took_ns", "total", "words"),
    )

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # How many more steps to count, and a weak reference to their optimizer, as its id may be
        # reused.
        self._left = 0
        self._optimizer: Callable[[], Any] = _none
        # A longer step is not counted; the time by which the current one must end.
        self._longest_ns = self._until_ns = 0
        # The end times of the steps that `settle` has not written yet.
        self.ends: list[int] = []
        # Cost of counting the last one of these steps; 0: not reached yet.
        self.took_ns = 0
        self.base = self.step = self.total = self.place = 0
        self.words = scratch_words()
        self.store = self.words.cast("B").cast("d")

    @property
    def ended_ns(self) -> int:
        """The end of the last counted step, or of the one before the first."""
        return self._until_ns - self._longest_ns

    def begin(self, steps: int, optimizer: Callable[[], Any], longest_ns: int) -> None:
        """A step has ended: count the next *steps* ones."""
        self._left, self._longest_ns, self.took_ns = steps, longest_ns, 0
        self._until_ns = self._clock() + longest_ns
        # Last, as counting begins here.
        self._optimizer = optimizer

    def stop(self) -> None:
        """Stop counting: the next step may differ from those before it. Thread-safe."""
        self._optimizer = _none

    def counts(self, optimizer: object) -> bool:
        """An optimizer has stepped; returns whether that was counted and nothing else is to be
        done."""
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
    """The step numbers of a process. Plain attributes, for the hot paths of hooks and `log`."""

    def __init__(self) -> None:
        # Both count from 0; -1 means none.
        # The last training step logged, or implied by calls without a step; the last implied one.
        self.last = self.implied = -1
        # Whether hooks count the steps.
        self.began = False
        self.in_step = False
        # Whether this step has called a model. A wait for a batch may just end an epoch.
        self.model_called = False
        self.work = Work()
        # The number of steps is the same on all ranks. The number by which the user logs the last
        # one may differ, and only logging ranks know it.
        self.count = self.logged_number = 0
        # The last step logged before the first step began, for example by a test.
        self.before_first = -1
        # The last logged step when the previous step ended, and when the current one began.
        self.logged_before = self._before_step = -1
        # The step of an evaluation's values before any training.
        self._evaluations = -1
        # In a step without hooks: settles counted steps, and finds out whether this step has called
        # a model.
        self.catch_up: Callable[[], None] | None = None
        # The counter of unmeasured steps, if there are hooks.
        self.counted: CountedSteps | None = None

    # -- for logged values

    def next(self, trains: bool) -> int:
        """The step of a call without one: the hooks' step, or a new one for each call."""
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
        """Whether a step has ended, by the hooks' count if there are hooks."""
        return self.count > 0 if self.began else self.last >= 0

    def train(self, step: int) -> None:
        """A training value was logged with this step."""
        if self.catch_up is not None:
            self.catch_up()
        # A lower one may be an epoch.
        self.last = max(self.last, step)
        if self.counted is not None:
            self.counted.step = self.next_logged()

    def of_values(self, trains: bool) -> int:
        """The hooks' step of a value that is logged now without a step."""
        if self.catch_up is not None:
            self.catch_up()
        if not self.count and self.work.micro_batches > _MOST_ACCUMULATED:
            # A loop that updates weights itself has no other steps.
            return self.work.micro_batches
        if trains and self.model_called:
            return self.next_logged()
        return self.logged_number if self.last == self.logged_before else self.last

    def trace_and_step(self) -> tuple[str, int | None]:
        """Trace and step of an event that happens now; empty before the first step.

        Between two steps the step is the one that has ended, as for values: people save and
        evaluate after a step. The time belongs to the next step, and so does the trace.
        """
        if self.began:
            # Hooks count alike on all ranks, whichever ranks log.
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
                # No step was logged yet: the hooks' steps replace counted calls.
                self.last = self.logged_before = -1
            self.before_first = self.last
        self._before_step = self.last

    def next_logged(self) -> int:
        """The number by which the user will log the step that ends next."""
        logged = self.last
        if logged == self.logged_before:
            return self.logged_number + 1
        # A value logged within a step belongs to it; one logged after a step belongs to that step.
        return logged if self.in_step and logged != self._before_step else logged + 1

    def resume_from(self, done: int) -> None:
        """Continue the count of steps before this process; a logged number takes precedence."""
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
    """The work of all steps: added up on the training thread, and written with each flush."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.forwards = self.micro_batches = 0
        self.gc_ns = self.retries = 0
        self.hook_ns = 0
        self.flops = 0.0
        self.flops_method = ""
        # The amounts that the words of steps contain already.
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
        """Append the words for what interrupted the step that ends."""
        if self.gc_ns != self.gc_written_ns:
            pending.append(_GC | self.gc_ns - self.gc_written_ns)
            self.gc_written_ns = self.gc_ns
        if self.retries:
            pending.append(_RETRIES | self.retries)
            self.retries = 0
