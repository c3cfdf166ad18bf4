"""Divides training steps into phases, from what hooks on models, optimizers and loaders report.

One stepper a process. Hooks call its parts at any moment, and hand to `failed` what these raise.
They report beginnings and ends, but an exception in forward or backward leaves out ends: whatever
begins next closes what is still open.
"""

from __future__ import annotations

from otel_ddp import errors
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.steps.backwards import Backwards
from otel_ddp.torch.steps.forwards import Forwards
from otel_ddp.torch.steps.loads import Loads
from otel_ddp.torch.steps.open_calls import OpenCalls
from otel_ddp.torch.steps.open_step import OpenStep, Search, StepEnd
from otel_ddp.torch.steps.optimizers import Optimizers
from otel_ddp.torch.steps.sampled import SampledSteps, StepListener
from otel_ddp.torch.steps.usual import unusual, usual_steps

_FAILURES_ALLOWED = 3


class Stepper:
    """The parts that hooks report to, and what is open and seen."""

    def __init__(self, progress: Progress) -> None:
        self.alive = True
        self.progress = progress
        self.sampled = SampledSteps(progress.work)
        self.calls = OpenCalls(progress, self.sampled)
        self.step = step = OpenStep(progress, self.calls, self._wrap_hooks)
        self.seen = step.seen
        self.backwards = Backwards(step, self.failed)
        self.usual = usual = usual_steps
        usual.measure(step, self.backwards)
        unusual.failed = self.failed
        self.backwards.hook.call(usual.gradient_arrived)
        progress.phases.settle = usual.leave
        self.loads = Loads(step, usual)
        self.forwards = Forwards(step, usual, self.backwards)
        self.optimizers = Optimizers(step, usual)
        self._compile = progress.phases.of_hooks("compile")
        self._failures = 0
        self._wrap_hooks()

    def _wrap_hooks(self) -> None:
        """Make the public hooks, as the present step needs them."""
        opened = self.progress.phases.opened
        for part in (self.loads, self.forwards, self.backwards, self.optimizers):
            for name in part.HOOKS:
                # Made once: a bound method is a new object each time it is asked for.
                hook = self.sampled.wrap(getattr(part, f"_{name}"), lambda: opened[-1].name)
                setattr(part, name, hook)

    def failed(self, where: str) -> None:
        """A hook of ours raised: after three times all of them are switched off."""
        errors.record_failure(where)
        self._failures += 1
        if self.alive and self._failures >= _FAILURES_ALLOWED:
            self.stop()
            errors.log.warning(
                "The hooks of otel_ddp have failed %d times and measure no more steps; "
                "what you log is recorded as before.",
                _FAILURES_ALLOWED,
            )

    def leave_to_parent(self) -> None:
        """In a forked child, and at the end: measure nothing more."""
        self.alive = False
        self.backwards.close()
        self.usual.leave()

    def stop(self) -> None:
        """Measure nothing more, and leave no phase open."""
        self.leave_to_parent()
        self.sampled.notify("forward_interrupted")
        calls = self.calls
        for phase in (calls.forward, calls.eval, calls.backward, self.step.optimizer):
            self.progress.phases.leave(phase)
        self.loads.close()
        self.progress.flush()
        self.progress.phases.settle = lambda: None

    def let_go(self) -> None:
        """Keep nothing of the user's: the hooks keep this stepper until there is another one."""
        self.sampled.listener = StepListener()
        self.step.end = StepEnd()
        self.step.search = Search()

    # -- compilation

    def compile_began(self, thread: int) -> None:
        """A graph is being compiled, in the middle of whatever needs it."""
        self.seen.compiles = True
        self.usual.leave()
        calls = self.calls
        # Backward may compile in a thread of autograd's; other threads' compiling is not a step's.
        evaluates = calls.forwards and thread == calls.forward_thread
        if thread == self.progress.thread.ident or calls.in_backward or evaluates:
            self.progress.phases.enter(self._compile)

    def compile_ended(self) -> None:
        """It is compiled."""
        self.progress.phases.leave(self._compile)
