"""The backwards of watched models: from the first gradient to those of all ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from otel_ddp import errors
from otel_ddp.torch.steps.open_calls import current_backward
from otel_ddp.torch.steps.open_step import OpenStep
from otel_ddp.torch.steps.sampled import OFTEN

# What a tensor's own register_hook calls. Private.
_REGISTER = "_register_hook_dict"
_KEY = "otel_ddp"
# After so many backwards without a step, no optimizer that we see will make one.
_LONGEST_ACCUMULATION = 32 * OFTEN


def _nothing(gradient: torch.Tensor) -> None:
    pass


class BackwardHook:
    """One hook for all outputs of all forwards: each node of the graph refers to the same one.

    It calls a function at the first gradient of a backward, and leaves the outputs alone.
    """

    __slots__ = ("_hooks", "_tensor", "hook")

    def __init__(self) -> None:
        # Nodes take the hooks of a tensor: of this one, which is no output of any model.
        self._tensor = torch.empty(0, requires_grad=True)
        self._hooks: OrderedDict[str, Any] = OrderedDict()
        self._tensor._backward_hooks = self._hooks
        self.hook: Callable[[torch.Tensor], None] = _nothing

    def call(self, hook: Callable[[torch.Tensor], None]) -> None:
        """From here on call this function, also from the nodes that have the hook already."""
        self.hook = self._hooks[_KEY] = hook

    def put_on(self, output: torch.Tensor, node: Any) -> None:
        """`output.register_hook(self.hook)` at a third of its price; *node* is its `grad_fn`."""
        if node is None:
            return  # a parameter lives on: it would get one more hook at each forward
        # A model may return the same output each time, one that it keeps.
        if (marks := getattr(node, "metadata", None)) is not None:
            if self in marks:
                return
            marks[self] = True
        if (register := getattr(node, _REGISTER, None)) is not None:
            register(self._tensor)
        else:
            output.register_hook(self.hook)


class Backwards:
    """Autograd calls these hooks, in whatever thread it works; none of them raises."""

    HOOKS = ("gradient_arrived", "gradients_done", "ended")
    gradient_arrived: Callable[[torch.Tensor], None]
    gradients_done: Callable[[], None]
    ended: Callable[[], None]

    def __init__(self, step: OpenStep, failed: Callable[[str], None]) -> None:
        """*failed*: what a hook that has raised is handed to."""
        self.alive = True
        self.hook = BackwardHook()
        self._progress = progress = step.progress
        self._sampled, self._calls, self._step = step.sampled, step.calls, step
        self._steps = progress.steps
        self._enter = progress.phases.enter
        self.failed = failed
        self._queue_callback = Variable._execution_engine.queue_callback

    def close(self) -> None:
        """Measure nothing more. A graph that lives on has our hook: it may be of no later run."""
        self.alive = False
        self.hook.call(_nothing)

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        """The first gradient of a backward."""
        if not self.alive:
            return
        try:
            calls = self._calls
            if calls.in_backward:
                if not calls.backward_has_raised():
                    return
                calls.close_backward()
            calls.in_backward = True
            calls.backward_id = current_backward()
            self._enter(calls.backward)
            # Runs when the local gradients are done, and before DDP's own finaliser, which is
            # queued later; what that callback queues in turn runs after the finaliser.
            self._queue_callback(self.gradients_done)
            if self._sampled.wants_backward:
                self._sampled.notify("backward_began")
        except errors.ANY_ERROR:
            self.failed("backward began")

    def _gradients_done(self) -> None:
        """The local gradients are there; DDP waits for those of the other ranks."""
        if not self.alive:
            return
        try:
            self._enter(self._calls.wait)
            self._queue_callback(self.ended)
        except errors.ANY_ERROR:
            self.failed("gradients done")

    def _ended(self) -> None:
        """The gradients of all ranks are there."""
        if not self.alive:
            return
        try:
            calls, step = self._calls, self._step
            # Closes the wait inside it as well.
            calls.close_backward()
            self._steps.micro_batches += 1
            step.batches.backward_ended()
            end = step.end
            end.backwards = since_step = end.backwards + 1
            if step.closure and step.optimizer not in self._progress.phases.opened:
                self._enter(step.optimizer)
            if not since_step % OFTEN:
                self._progress.flush_if_due()
                if since_step == _LONGEST_ACCUMULATION and not step.seen.steps:
                    self._sampled.listener.no_step_ended()
            if step.stepped_in_backward:
                step.stepped_in_backward = False
                step.finish()
        except errors.ANY_ERROR:
            self.failed("backward ended")
