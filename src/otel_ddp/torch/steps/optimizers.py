"""The steps of the optimizers that train watched models."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch.compiler import is_compiling

from otel_ddp.torch.inspection import times_called
from otel_ddp.torch.steps.open_calls import outside_of_backward
from otel_ddp.torch.steps.open_step import OpenStep, is_infinity, steps_made
from otel_ddp.torch.steps.usual import UsualSteps


def _only_fills_its_state() -> bool:
    """Whether a checkpoint steps this optimizer, to have its state made.

    Torch gives it gradients of zero for that, and a learning rate of zero.
    """
    if is_compiling():
        return False  # Dynamo knows no frames
    checkpoints = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(checkpoints, "_init_optim_state", None), "__code__", None)
    return code is not None and times_called(sys._getframe(), code) > 0


class Optimizers:
    """One at a time: what another one does inside of a step is part of that step."""

    HOOKS = ("began", "ended")
    began: Callable[[torch.optim.Optimizer, bool], None]
    ended: Callable[[torch.optim.Optimizer], None]

    def __init__(self, step: OpenStep, usual: UsualSteps) -> None:
        self._steps, self._phases = step.progress.steps, step.progress.phases
        self._sampled, self._calls, self._step = step.sampled, step.calls, step
        self._usual = usual

    def _began(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer of a watched model begins its step. *closure*: which calls the model."""
        self._usual.leave()
        calls, step = self._calls, self._step
        # Asked only where something is open: Dynamo may trace this, and knows no threads.
        if calls.in_backward or calls.forwards:
            if calls.another_thread_works(threading.get_ident()):
                return
            if calls.in_backward:
                calls.close_what_raised()
        # One optimizer a parameter, inside backward: that time stays backward. An optimizer inside
        # another (ZeRO's) is part of that one's step.
        open_one = step.optimizing
        if calls.in_backward or (open_one is not None and open_one != id(optimizer)):
            return
        if not step.end.backwards and _only_fills_its_state():
            return
        if calls.forwards:
            calls.close_forward()
        # The same one again: the last time it has raised, or this is the step of a class above.
        if open_one is not None or not self._steps.began:
            step.begin()
        step.optimizing = id(optimizer)
        step.closure = closure
        # A closure has the loop's own work in it, up to the end of backward.
        if not closure or step.end.backwards:
            self._phases.enter(step.optimizer)
        if not step.end.known:
            step.end.choose(optimizer)
        if self._sampled.sampling and not closure and step.end.is_of(optimizer):
            self._sampled.notify("optimizer_steps", optimizer)

    def _ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of a watched model has finished its step."""
        self._usual.leave()
        step = self._step
        if self._calls.in_backward:
            # Another thread's may end while this backward is under way.
            if not outside_of_backward():
                step.stepped_in_backward = True
            return
        if step.optimizing != id(optimizer):
            return
        # A closure has brought the gradients in the middle of the step.
        if step.closure and self._sampled.sampling and step.end.is_of(optimizer):
            self._sampled.notify("optimizer_steps", optimizer)
        step.optimizing = None
        step.closure = False
        ours = step.end.ended_by(optimizer)
        step.batches.optimizer_stepped(id(optimizer), ours)
        if not ours:
            self._phases.leave(step.optimizer)
            return
        if not self._steps.count:
            self._sampled.run("resume", self._resume, optimizer)
        found = getattr(optimizer, "found_inf", None)
        step.finish(found is not None and is_infinity(found), step.optimizer)
        if found is None:
            self._usual.learn()

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step is over: a run that was resumed has made others before."""
        self._steps.resume_from(steps_made(optimizer) - 1)
