"""The forwards of watched models: their phases, and the batches that they work on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from otel_ddp.torch.steps.backwards import Backwards
from otel_ddp.torch.steps.open_calls import is_another_thread
from otel_ddp.torch.steps.open_step import OpenStep
from otel_ddp.torch.steps.sampled import OFTEN
from otel_ddp.torch.steps.usual import UsualSteps
from otel_ddp.torch.steps.watched_model import WatchedModel

_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident


class Forwards:
    """Where a forward begins, no older one is open: it closes what an exception has left."""

    HOOKS = ("began", "buffers_arrived", "ended")
    began: Callable[..., None]
    buffers_arrived: Callable[[], None]
    ended: Callable[[WatchedModel, torch.nn.Module, Any], bool]

    def __init__(self, step: OpenStep, usual: UsualSteps, backwards: Backwards) -> None:
        self._progress = progress = step.progress
        self._sampled, self._calls, self._step = step.sampled, step.calls, step
        self._usual = usual
        self._steps, self._work, self._phases = progress.steps, progress.work, progress.phases
        self._thread = progress.thread
        self._buffers = progress.phases.of_hooks("comm_wait", of_buffers=True)

    def _began(
        self,
        watched: WatchedModel,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """A watched model is called."""
        calls = self._calls
        trains = module.training or watched.trains_in_eval
        if not trains and (inside := watched.inside()) is not None:
            trains = bool(inside.training)
        trains = trains and _is_grad_enabled()
        thread = _get_ident()
        beside = not trains and self._steps.in_step and not calls.in_backward
        if beside and is_another_thread(self._thread.ident, thread):
            return  # an evaluator, and the step goes on meanwhile
        self._usual.leave()
        if thread != calls.forward_thread and self._is_beside_step(thread, trains):
            return
        if calls.in_backward:
            calls.close_what_raised()
        if calls.in_backward or calls.forwards:
            # A model inside a model, or one that is computed again for the backward under way.
            calls.forwards += 1
            return
        calls.forwards = 1
        calls.forward_thread = thread
        calls.trains = trains
        phases = self._phases
        if not trains:
            phases.enter(calls.eval)
            return
        steps, step = self._steps, self._step
        calls.model = watched
        steps.model_called = True
        step.evaluated = None
        if thread != self._thread.ident:
            self._progress.train_in(thread)
        # A forward inside an optimizer's step begins no other step: its closure has called the
        # model, and may do so again (LBFGS).
        if step.closure:
            phases.leave(step.optimizer)
        elif not steps.in_step or step.end.backwards:
            step.begin()
        phases.enter(calls.forward)
        if watched.syncs_buffers and module.will_sync_module_buffers():
            phases.enter(self._buffers)
        batches = step.batches
        batches.model = batches.model or watched
        watched.counted = batches.model is watched
        watched.take(args, kwargs, self._work)
        if watched.flops_per_unit is None:
            self._sampled.notify("forward_began", watched, module, args, kwargs)
        batches.forward_begins(watched)

    def _is_beside_step(self, thread: int, trains: bool) -> bool:
        """Whether a forward that begins is no part of the step; if it is, it ends an older one."""
        calls = self._calls
        if calls.is_beside_step(thread, trains):
            return True
        if calls.forwards and not calls.in_backward:
            calls.close_forward()
        return False

    def evaluated_past_ddp(self, watched: WatchedModel, module: torch.nn.Module) -> bool:
        """Begin an evaluation if the module inside DDP is called directly; whether it is one."""
        calls = self._calls
        self._usual.leave()
        if calls.forwards or calls.in_backward or (module.training and _is_grad_enabled()):
            return False
        self.began(watched, module, (), None)
        return calls.forwards > 0

    def _buffers_arrived(self) -> None:
        """DDP has given every rank the same buffers; the model itself begins."""
        if _get_ident() == self._calls.forward_thread:
            self._phases.leave(self._buffers)

    def _ended(self, watched: WatchedModel, module: torch.nn.Module, output: Any) -> bool:
        """A watched model has returned, or raised; whether its outputs get the hook of backward."""
        calls = self._calls
        if _get_ident() != calls.forward_thread:
            return False
        self._usual.leave()
        if calls.forwards:
            calls.forwards -= 1
        if calls.forwards or calls.in_backward:
            return False
        if calls.trains:
            self._phases.leave(calls.forward)
            steps = self._steps
            steps.forwards += 1
            if not steps.forwards % OFTEN:
                self._progress.flush_if_due()
            sampled = self._sampled
            if sampled.wants_loss or watched.flops_per_unit is None:
                sampled.notify("forward_ended", watched, module, output)
            return True
        self._phases.leave(calls.eval)
        self._progress.flush_if_due()
        if _is_grad_enabled() and not self._steps.model_called:
            # If a step ends before a model is called in training mode, this one is trained.
            self._step.evaluated = watched
        return False
