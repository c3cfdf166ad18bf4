"""The steps: the numbers under which hooks and the user know them, and their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from otel_ddp.journal import layout
from otel_ddp.journal.writer import scratch_words

# After this many backwards without a step of an optimizer, none is expected.
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


class StepNumbers:
    """The numbers of a process's steps. Plain attributes, for hooks and `log` go by them."""

    def __init__(self) -> None:
        # Both count from 0, and -1 means none.
        self.last = self.implied = -1
        """The last training step that was logged, or implied by calls without a step; and the last
        implied one."""
        self.began = False
        """Whether hooks count the steps."""
        self.in_step = False
        self.model_called = False
        """Whether a model was called in this step: waiting for a batch may end an epoch."""
        self.work = Work()
        # The number of steps is the same on all ranks. The number under which the user logs the
        # last one may differ, and only ranks that log know it.
        self.count = self.logged_number = 0
        # What had been logged when the first step began: of a model's size, maybe, or of a test.
        self.before_first = -1
        # What had been logged when the last step ended, and when the present one began.
        self.logged_before = self._before_step = -1
        # The last step at the time a lower one was logged, and the lower one.
        self._lower = (-1, -1)
        # The step of an evaluation's values before anything trains.
        self._evaluations = -1
        self.look: Callable[[], None] | None = None
        """In a step whose hooks are off: finds out how many have ended, and whether a model was
        called in this one."""
        self.counted: CountedSteps | None = None
        """Where these steps have hooks: what counts those without."""

    # -- of values that are logged

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
        """Whether a step has ended: with hooks one that they counted."""
        return self.count > 0 if self.began else self.last >= 0

    def logged_beside(self, step: int) -> None:
        """A tracker was given this step, of frames or epochs: only where no hooks count it is one.

        Hooks that begin later replace it, as they replace counted calls.
        """
        if not self.began and step > self.last:
            self.last = self.implied = step

    def train(self, step: int) -> None:
        """A training value was logged with this step."""
        if self.look is not None:
            self.look()
        self.last = step if step >= self.last else self.after_lower(step)
        if self.counted is not None:
            self.counted.step = self.next_logged()

    def after_lower(self, step: int) -> int:
        """The step of training after a call with a lower step than the last one.

        Two rising lower steps mean that training went back. A single one may count epochs.
        """
        last, lower = self._lower
        if last == self.last and step > lower:
            return step
        self._lower = self.last, step
        return self.last

    def of_values(self, trains: bool) -> int:
        """The hooks' step of a value that is logged now without a step."""
        if self.look is not None:
            self.look()
        if not self.count and self.work.micro_batches > _MOST_ACCUMULATED:
            # A loop that changes the weights by itself has only these steps.
            return self.work.micro_batches
        if trains and self.model_called:
            return self.next_logged()
        return self.logged_number if self.last == self.logged_before else self.last

    def trace_and_step(self) -> tuple[str, int | None]:
        """The trace and the step of what happens now; empty before the first one.

        Between two steps it is the step that has ended, as for values: people save and evaluate
        after a step. Its time belongs to the step that follows, so the trace is that one's.
        """
        if self.began:
            # The hooks count alike on all ranks; which ranks log does not matter.
            step = self.of_values(True)
            return layout.trace_of_step(self.count + 1), step
        return (layout.trace_of_step(self.last), self.last) if self.last >= 0 else ("", None)

    # -- of hooks

    def begin_step(self) -> None:
        """Hooks have seen work."""
        self.in_step = True
        if not self.began:
            self.began = True
            if self.last == self.implied:
                # No step was logged yet: the steps of the hooks replace the counted calls.
                self.last = self.logged_before = -1
            self.before_first = self.last
        self._before_step = self.last

    def next_logged(self) -> int:
        """The number under which the user will log the step that ends next."""
        logged = self.last
        if logged == self.logged_before:
            return self.logged_number + 1
        # A value logged within a step belongs to it; a value logged after a step belongs to that.
        return logged if self.in_step and logged != self._before_step else logged + 1

    def resume_from(self, done: int) -> None:
        """Counts on from the steps before this process; a logged number takes precedence."""
        if not self.count and self.last < 0:
            self.logged_number = max(self.logged_number, done)


class Amounts(NamedTuple):
    """What was worked on since the beginning, or in one step."""

    samples: int
    tokens: int
    flops: float
    forwards: int
    micro_batches: int


class Work:
    """The work of all steps, raised on the training thread alone and counted with each flush."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.forwards = self.micro_batches = 0
        self.gc_ns = self.retries = 0
        self.hook_ns = 0
        """What our hooks took of the training thread."""
        self.flops = 0.0
        self.flops_method = ""
        self.gc_written_ns = self.written = 0
        """Up to where the words of the steps tell of it."""

    def amounts(self) -> Amounts:
        """What was worked on so far."""
        return Amounts(self.samples, self.tokens, self.flops, self.forwards, self.micro_batches)

    def add(self, more: Amounts) -> None:
        """This much was worked on besides."""
        self.samples += more.samples
        self.tokens += more.tokens
        self.flops += more.flops
        self.forwards += more.forwards
        self.micro_batches += more.micro_batches

    def write_stops(self, pending: list[int]) -> None:
        """Adds the words of the step that ends: for what it was stopped."""
        if self.gc_ns != self.gc_written_ns:
            pending.append(_GC | self.gc_ns - self.gc_written_ns)
            self.gc_written_ns = self.gc_ns
        if self.retries:
            pending.append(_RETRIES | self.retries)
            self.retries = 0
