"""Divides training steps into phases, from what hooks on models, optimizers and loaders report.

One stepper a process. Hooks call it at any moment, and hand to `failed` what it raises. They report
beginnings and ends, but an exception in forward or backward leaves out ends: whatever begins next
closes what is still open.
"""

from __future__ import annotations

import sys
import threading
from time import thread_time_ns
from typing import Any

import torch
from torch.autograd import Variable
from torch.compiler import is_compiling

from otel_ddp import errors
from otel_ddp.recording.phases import Phase
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.steps import StepNumbers
from otel_ddp.torch.inspection import CALL_MODULE, times_called
from otel_ddp.torch.steps.backward_hook import BackwardHook
from otel_ddp.torch.steps.batches import Batches
from otel_ddp.torch.steps.ends import StepEnd, is_infinity, steps_made
from otel_ddp.torch.steps.open_calls import (
    OpenCalls,
    current_backward,
    is_another_thread,
    outside_of_backward,
)
from otel_ddp.torch.steps.sampled import SampledSteps
from otel_ddp.torch.steps.watched_model import WatchedModel

_FAILURES_ALLOWED = 3
# A flush is looked for at every so many events of a kind, for where no step ends.
_OFTEN = 16
# After so many backwards without a step, no optimizer that we see will make one.
_LONGEST_ACCUMULATION = 32 * _OFTEN
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident


class Seen:
    """What was seen at all. Capabilities are read off it."""

    __slots__ = ("_before", "_steps", "compiles", "float16", "loads")

    def __init__(self, steps: StepNumbers) -> None:
        self._steps = steps
        self._before = steps.count, steps.forwards, steps.micro_batches
        self.loads = 0
        self.compiles = self.float16 = False

    @property
    def steps(self) -> int:
        """The steps since these hooks are on."""
        return self._steps.count - self._before[0]

    @property
    def forwards(self) -> int:
        """The training forwards since then."""
        return self._steps.forwards - self._before[1]

    @property
    def backwards(self) -> int:
        """The backwards since then."""
        return self._steps.micro_batches - self._before[2]


class Search:
    """The search for models, which follows what the hooks see. This one searches for none."""

    on = False

    def batch_wanted(self) -> None:
        """A loader is asked for a batch, and no model is known."""

    def compiling(self) -> None:
        """A graph is about to be compiled."""

    def model_stepped(self) -> None:
        """The optimizer of a watched model has made a step."""

    def model_not_called(self) -> None:
        """A step has ended, and no call of a watched model was seen."""

    def unknown_optimizer_came(self) -> None:
        """An optimizer trains no watched model."""

    def unknown_optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has made a step."""


class Stepper:
    """What hooks report to: it begins and ends the phases of a step, and the step."""

    def __init__(self, progress: Progress) -> None:
        self.alive = True
        self.progress = progress
        self.sampled = SampledSteps()
        self.calls = OpenCalls(progress, self.sampled)
        self.end = StepEnd()
        self.batches = Batches(progress.work)
        self.seen = Seen(progress.steps)
        self.search = Search()
        self.backward_hook = BackwardHook()
        self.backward_hook.call(self.gradient_arrived)
        self._steps, self._phases = progress.steps, progress.phases
        self._optimizer = progress.phases.of_hooks("optimizer")
        self._buffers = progress.phases.of_hooks("comm_wait", of_buffers=True)
        self._compile = progress.phases.of_hooks("compile")
        self._queue_callback = Variable._execution_engine.queue_callback
        # The optimizer whose step is open, by its id; and whether that step was given a closure,
        # which calls the model.
        self._optimizing: int | None = None
        self._closure = False
        # Whether an optimizer has stepped inside the backward that is under way.
        self._stepped_in_backward = False
        # A model in evaluation mode that was called with gradients on, and none in training mode
        # since. Where a step ends, it trains so.
        self._evaluated: WatchedModel | None = None
        # The line of ours mostly stands in the thread that trains.
        self._made_in = _get_ident()
        self.loads_in = 0
        """The thread that asked for the last batch."""
        self._failures = 0

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

    def took_since(self, began_ns: int) -> None:
        """A hook is done that has begun then, by the clock of its thread."""
        self.progress.work.hook_ns += thread_time_ns() - began_ns

    def leave_to_parent(self) -> None:
        """In a forked child, and at the end: measure nothing more."""
        self.alive = False
        # A graph that lives on has our hook: it may be of no later run.
        self.backward_hook.take_off()

    def stop(self) -> None:
        """Measure nothing more, and leave no phase open."""
        self.leave_to_parent()
        calls = self.calls
        self.sampled.run(self.sampled.readings.forward_interrupted)
        for phase in (calls.forward, calls.eval, calls.backward, self._optimizer, calls.load):
            self._phases.leave(phase)
        self.progress.flush()

    def let_go(self) -> None:
        """Keep nothing of the user's: the hooks keep this stepper until there is another one."""
        self.end = StepEnd()
        self.search = Search()

    def _count_collectives(self) -> None:
        """In a step in which they are counted: a hook was called, in this phase."""
        if self.sampled.counting:
            self.sampled.run(self.sampled.readings.hook_called, self._phases.opened[-1].name)

    # -- steps

    def _begin(self) -> None:
        """Work begins: of a new step, or more of the same."""
        # An optimizer that raised has not reported its end.
        if self._optimizing is not None:
            self._optimizing = None
            self._closure = False
            self._phases.leave(self._optimizer)
        # Work begins again after a backward, and no optimizer made a step of it: more of the same
        # step, unless the scaler has seen to it that none was made.
        if self.end.scaler_skipped():
            self._finish(skipped=True)
        steps = self._steps
        if not steps.in_step:
            if steps.began:
                steps.begin_step()
            else:
                self.sampled.readings.first_step_began()
                self.progress.begin_steps()

    def _finish(self, skipped: bool = False, phase: Phase | None = None) -> None:
        """The step is over, and so is *phase*."""
        if self._evaluated is not None:
            self._evaluated.trains_in_eval = True
        if not self.end.backwards:
            self.batches.no_backward_seen()
        self.end.step_ended()
        self.batches.step_ends(self.end.others_step())
        progress, sampled = self.progress, self.sampled
        if progress.step_finished(skipped, phase) or sampled.sampling:
            sampled.run(progress.flush)
            sampled.run(sampled.readings.step_ended)
        following = self._steps.count + 1
        if following >= sampled.next_change:
            sampled.begin(following)

    # -- loaders: a batch begins a step, or is the next one of the step that is open

    def load_began(self) -> None:
        """A loader is asked for the next batch."""
        self._count_collectives()
        calls = self.calls
        if not self.end.has_model:
            self.search.batch_wanted()
            return
        thread, trains = _get_ident(), self.progress.thread.ident
        if trains != thread and is_another_thread(trains or self._made_in, thread):
            return  # a thread fetches ahead: training does not wait for that
        if thread != calls.forward_thread and calls.another_thread_works(thread):
            return
        if calls.in_backward:
            calls.close_what_raised()
        in_forward = calls.forwards and not calls.in_backward
        if in_forward and not times_called(sys._getframe(), CALL_MODULE):
            calls.close_forward()
        if not calls.forwards:
            # In a forward, it is a model that fetches its batches by itself.
            if calls.in_backward:
                return
            if not self._steps.in_step or self.end.backwards:
                self._begin()
        self.loads_in = thread
        self.seen.loads += 1
        self._phases.enter(calls.load)

    def load_ended(self) -> None:
        """The batch is there."""
        self._count_collectives()
        if _get_ident() == self.loads_in:
            self._phases.leave(self.calls.load)
            if not self.seen.loads % _OFTEN:
                self.progress.flush_if_due()

    # -- models: where a forward begins, no older one is open

    def forward_began(
        self,
        watched: WatchedModel,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """A watched model is called."""
        self._count_collectives()
        calls, steps = self.calls, self._steps
        trains = module.training or watched.trains_in_eval
        if not trains and (inside := watched.inside()) is not None:
            trains = bool(inside.training)
        trains = trains and _is_grad_enabled()
        thread = _get_ident()
        beside = not trains and steps.in_step and not calls.in_backward
        if beside and is_another_thread(self.progress.thread.ident, thread):
            return  # an evaluator, and the step goes on meanwhile
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
        steps.model_called = True
        self._evaluated = None
        if thread != self.progress.thread.ident:
            self.progress.train_in(thread)
        # A forward inside an optimizer's step begins no other step: its closure has called the
        # model, and may do so again (LBFGS).
        if self._closure:
            phases.leave(self._optimizer)
        elif not steps.in_step or self.end.backwards:
            self._begin()
        phases.enter(calls.forward)
        if watched.syncs_buffers and module.will_sync_module_buffers():
            phases.enter(self._buffers)
        batches = self.batches
        batches.model = batches.model or watched
        watched.counted = batches.model is watched
        watched.take(args, kwargs, self.progress.work)
        if watched.flops_per_unit is None:
            sampled = self.sampled
            sampled.run(sampled.readings.forward_began, watched, module, args, kwargs)
        batches.forward_begins(watched)

    def _is_beside_step(self, thread: int, trains: bool) -> bool:
        """Whether a forward that begins is no part of the step; if it is, it ends an older one."""
        calls = self.calls
        if calls.is_beside_step(thread, trains):
            return True
        if calls.forwards and not calls.in_backward:
            calls.close_forward()
        return False

    def evaluated_past_ddp(self, watched: WatchedModel, module: torch.nn.Module) -> bool:
        """Begin an evaluation if the module inside DDP is called directly; whether it is one."""
        calls = self.calls
        if calls.forwards or calls.in_backward or (module.training and _is_grad_enabled()):
            return False
        self.forward_began(watched, module, (), None)
        return calls.forwards > 0

    def buffers_arrived(self) -> None:
        """DDP has given every rank the same buffers; the model itself begins."""
        self._count_collectives()
        if _get_ident() == self.calls.forward_thread:
            self._phases.leave(self._buffers)

    def forward_ended(self, watched: WatchedModel, module: torch.nn.Module, output: Any) -> bool:
        """A watched model has returned, or raised; whether its outputs get the hook of backward."""
        self._count_collectives()
        calls, steps = self.calls, self._steps
        if _get_ident() != calls.forward_thread:
            return False
        if calls.forwards:
            calls.forwards -= 1
        if calls.forwards or calls.in_backward:
            return False
        if calls.trains:
            self._phases.leave(calls.forward)
            steps.forwards += 1
            if not steps.forwards % _OFTEN:
                self.progress.flush_if_due()
            sampled = self.sampled
            if sampled.wants_loss or watched.flops_per_unit is None:
                sampled.run(sampled.readings.forward_ended, watched, module, output)
            return True
        self._phases.leave(calls.eval)
        self.progress.flush_if_due()
        if _is_grad_enabled() and not steps.model_called:
            # If a step ends before a model is called in training mode, this one is trained.
            self._evaluated = watched
        return False

    # -- backward: autograd calls these, in whatever thread it works

    def gradient_arrived(self, gradient: torch.Tensor) -> None:
        """The first gradient of a backward."""
        if not self.alive:
            return
        began_ns = thread_time_ns()
        try:
            calls = self.calls
            if calls.in_backward:
                if not calls.backward_has_raised():
                    return
                calls.close_backward()
            self._count_collectives()
            calls.in_backward = True
            calls.backward_id = current_backward()
            self._phases.enter(calls.backward)
            # Runs when the local gradients are done, and before DDP's own finaliser, which is
            # queued later; what that callback queues in turn runs after the finaliser.
            self._queue_callback(self._gradients_done)
            if self.sampled.wants_backward:
                self.sampled.run(self.sampled.readings.backward_began)
        except errors.ANY_ERROR:
            self.failed("backward began")
        finally:
            self.took_since(began_ns)

    def _gradients_done(self) -> None:
        """The local gradients are there; DDP waits for those of the other ranks."""
        if not self.alive:
            return
        began_ns = thread_time_ns()
        try:
            self._count_collectives()
            self._phases.enter(self.calls.wait)
            self._queue_callback(self._backward_ended)
        except errors.ANY_ERROR:
            self.failed("gradients done")
        finally:
            self.took_since(began_ns)

    def _backward_ended(self) -> None:
        """The gradients of all ranks are there."""
        if not self.alive:
            return
        began_ns = thread_time_ns()
        try:
            self._count_collectives()
            end = self.end
            # Closes the wait inside it as well.
            self.calls.close_backward()
            self._steps.micro_batches += 1
            self.batches.backward_ended()
            end.backwards += 1
            if self._closure and self._optimizer not in self._phases.opened:
                self._phases.enter(self._optimizer)
            if not end.backwards % _OFTEN:
                self.progress.flush_if_due()
                if end.backwards == _LONGEST_ACCUMULATION and not self.seen.steps:
                    self.sampled.readings.no_step_ended()
            if self._stepped_in_backward:
                self._stepped_in_backward = False
                self._finish()
        except errors.ANY_ERROR:
            self.failed("backward ended")
        finally:
            self.took_since(began_ns)

    # -- optimizers: one at a time, and what another one does inside of a step is part of that step

    def optimizer_began(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer of a watched model begins its step. *closure*: which calls the model."""
        self._count_collectives()
        calls, end = self.calls, self.end
        # Asked only where something is open: Dynamo may trace this, and knows no threads.
        if calls.in_backward or calls.forwards:
            if calls.another_thread_works(_get_ident()):
                return
            if calls.in_backward:
                calls.close_what_raised()
        # One optimizer a parameter, inside backward: that time stays backward. An optimizer inside
        # another (ZeRO's) is part of that one's step.
        open_one = self._optimizing
        if calls.in_backward or (open_one is not None and open_one != id(optimizer)):
            return
        if not end.backwards and _only_fills_its_state():
            return
        if calls.forwards:
            calls.close_forward()
        # The same one again: the last time it has raised, or this is the step of a class above.
        if open_one is not None or not self._steps.began:
            self._begin()
        self._optimizing = id(optimizer)
        self._closure = closure
        # A closure has the loop's own work in it, up to the end of backward.
        if not closure or end.backwards:
            self._phases.enter(self._optimizer)
        if not end.known:
            end.choose(optimizer)
        if not closure:
            self._sample_optimizer(optimizer)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of a watched model has finished its step."""
        self._count_collectives()
        if self.calls.in_backward:
            # Another thread's may end while this backward is under way.
            if not outside_of_backward():
                self._stepped_in_backward = True
            return
        if self._optimizing != id(optimizer):
            return
        # A closure has brought the gradients in the middle of the step.
        if self._closure:
            self._sample_optimizer(optimizer)
        self._optimizing = None
        self._closure = False
        ours = self.end.ended_by(optimizer)
        self.batches.optimizer_stepped(id(optimizer), ours)
        if not ours:
            self._phases.leave(self._optimizer)
            return
        if not self._steps.count:
            self.sampled.run(self._resume, optimizer)
        found = getattr(optimizer, "found_inf", None)
        self._finish(found is not None and is_infinity(found), self._optimizer)

    def _sample_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sampled.sampling and self.end.is_of(optimizer):
            self.sampled.run(self.sampled.readings.optimizer_steps, optimizer)

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step is over: a run that was resumed has made others before."""
        self._steps.resume_from(steps_made(optimizer) - 1)

    # -- compilation

    def compile_began(self, thread: int) -> None:
        """A graph is being compiled, in the middle of whatever needs it."""
        self.seen.compiles = True
        calls = self.calls
        # Backward may compile in a thread of autograd's; other threads' compiling is not a step's.
        evaluates = calls.forwards and thread == calls.forward_thread
        if thread == self.progress.thread.ident or calls.in_backward or evaluates:
            self._phases.enter(self._compile)

    def compile_ended(self) -> None:
        """It is compiled."""
        self._phases.leave(self._compile)


def _only_fills_its_state() -> bool:
    """Whether a checkpoint steps this optimizer, to have its state made.

    Torch gives it gradients of zero for that, and a learning rate of zero.
    """
    if is_compiling():
        return False  # Dynamo knows no frames
    checkpoints = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(checkpoints, "_init_optim_state", None), "__code__", None)
    return code is not None and times_called(sys._getframe(), code) > 0
