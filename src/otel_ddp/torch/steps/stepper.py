"""Divides training steps into phases, from what hooks on models, optimizers and loaders report.

One stepper a process. Hooks call it at any moment, and hand to `failed` what it raises. They report
beginnings and ends, but an exception in forward or backward leaves out ends: whatever begins next
closes what is still open.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from time import thread_time_ns
from typing import Any, TypeVar

import torch
from torch.autograd import Variable
from torch.compiler import is_compiling

from otel_ddp import errors
from otel_ddp.recording.phases import Phase
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.steps import Amounts
from otel_ddp.torch.inspection import CALL_MODULE, times_called
from otel_ddp.torch.steps.budget import ODD, Cost, in_sample
from otel_ddp.torch.steps.ends import StepEnd, steps_made
from otel_ddp.torch.steps.group_calls import GroupCalls
from otel_ddp.torch.steps.open_calls import (
    BackwardHook,
    OpenCalls,
    current_backward,
    is_another_thread,
    outside_of_backward,
)
from otel_ddp.torch.steps.sampled import SampledSteps
from otel_ddp.torch.steps.watched_model import Batches, WatchedModel

_FAILURES_ALLOWED = 3
# A flush is looked for at every so many forwards, for where no step ends.
_OFTEN = 16
# After so many backwards without a step, no optimizer that we see will make one.
_LONGEST_ACCUMULATION = 32 * _OFTEN
# At most so many steps in a row are only counted.
_MOST_COUNTED = 64
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"
# Other optimizers make no more steps than this in one of ours. After that our own may have gone.
_MOST_OTHERS = 20
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident
_T = TypeVar("_T")


class Search:
    """The search for models, which follows what the hooks see. This one searches for none."""

    on = False

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        """*begin*: begins one, where a model was named and steps never call it."""
        self._begin = begin

    def batch_wanted(self) -> None:
        """A loader is asked for a batch, and no model is known."""

    def compiling(self) -> None:
        """A graph is about to be compiled."""

    def model_stepped(self) -> None:
        """The optimizer of a watched model has made a step."""

    def model_not_called(self) -> None:
        """A step has ended, and no call of a watched model was seen."""
        self._begin()

    def unknown_optimizer_came(self) -> None:
        """An optimizer has begun its first step, and trains no watched model."""

    def unknown_optimizer_stepped(self) -> None:
        """An optimizer that trains no watched model has made a step."""


class Stepper:
    """What hooks report to: it begins and ends the phases of a step, and the step."""

    def __init__(self, progress: Progress) -> None:
        self.alive = True
        self.progress = progress
        self.sampled = SampledSteps()
        self.calls = OpenCalls(progress)
        self.group_calls = GroupCalls(progress)
        self.end = StepEnd()
        self.batches = Batches(progress.work)
        self.search = Search()
        self.backward_hook = BackwardHook()
        self.backward_hook.call(self.gradient_arrived)
        self._steps, self._phases, self._work = progress.steps, progress.phases, progress.work
        self._optimizer = progress.phases.of_hooks("optimizer")
        self._buffers = progress.phases.of_hooks("comm_wait", of_buffers=True)
        self._compile = progress.phases.of_hooks("compile")
        self._graph = progress.phases.of_hooks("graph")
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
        self.loads = self.loads_in = 0
        """How many batches were asked for, and the thread that asked for the last one."""
        self.compiles = False
        """Whether anything was compiled."""
        self.replays = False
        """Whether the last step was replayed from a graph of the device."""
        # Whether a graph is being captured, and how many of our steps it has so far.
        self._is_capturing = False
        self._captured_steps = 0
        # Nested optimizer steps in it: the step of a class may call that of its base.
        self._open_captured = 0
        self._failures = 0
        self.measured = True
        """Whether the phases of the present step are measured. Where they are not, hooks are off
        but for the one after an optimizer's step."""
        self.switch_hooks: Callable[[bool], None] = lambda on: None
        """Puts the hooks on and off between two steps."""
        self.cost = Cost(progress, self.sampled, self.group_calls)
        # A style of training whose steps are not known by the ends of optimizers' steps alone.
        self._needs_hooks = False
        # Whether the present step is measured from its beginning.
        self._whole = False
        # Of how many steps this one has the work, where hooks have not seen all of it.
        self._missed = 0
        # Of the last whole measured step; and since the beginning, at the end of a step.
        self._each = self._before = Amounts(0, 0, 0.0, 0, 0)
        # The nodes of autograd that a measured step makes, and those made when that one ended;
        # whether steps differ in that, and whether a value was logged while the hooks were off.
        self._nodes_each = self._nodes_before = self._nodes_at = 0
        self._nodes_vary = self._logs = False
        self._looks = self._look

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

    def act(self, where: str, act: Callable[..., _T], *given: Any) -> _T | None:
        """Do what a hook is for, contain what it raises, and note what that took of its thread."""
        if self._is_capturing and self.captures():
            return None
        began_ns = thread_time_ns()
        try:
            if self.sampled.counting:
                self.sampled.run(self.sampled.readings.hook_called, self._phases.opened[-1].name)
            return act(*given)
        except errors.ANY_ERROR:
            self.failed(where)
            return None
        finally:
            ended_ns = thread_time_ns()
            self.cost.took(ended_ns - began_ns)
            self.cost.hook_done(ended_ns)

    def leave_to_parent(self) -> None:
        """In a forked child, and at the end: measure nothing more."""
        self.alive = False
        self.progress.counted.stop()
        self.group_calls.leave_to_parent()
        # A graph that lives on has our hook: it may be of no later run.
        self.backward_hook.take_off()

    def stop(self) -> None:
        """Measure nothing more, and leave no phase open."""
        self.leave_to_parent()
        self.group_calls.give_up()
        self.progress.settle()
        calls = self.calls
        for phase in (calls.forward, calls.eval, calls.backward, self._optimizer, calls.load):
            self._phases.leave(phase)
        self._steps.look = None
        if not self.measured:
            self.measured = True
            self._phases.go_on_measured()
        self.progress.flush()

    def let_go(self) -> None:
        """Keep nothing of the user's: the hooks keep this stepper until there is another one."""
        self.end = StepEnd()
        self.search = Search()

    # -- steps

    def _begin(self) -> None:
        """Work begins: of a new step, or more of the same."""
        # An optimizer that raised has not reported its end.
        if self._optimizing is not None:
            self._optimizing = None
            self._closure = False
            self._phases.leave(self._optimizer)
        steps = self._steps
        if not steps.in_step:
            if steps.began:
                steps.begin_step()
            else:
                self.sampled.readings.first_step_began()
                self.progress.begin_steps()

    def _finish(
        self, skipped: bool = False, phase: Phase | None = None, between: bool = False
    ) -> None:
        """The step is over, and so is *phase*. *between*: no call of a model is open."""
        if self._evaluated is not None:
            self._evaluated.trains_in_eval = True
        if not self.end.backwards:
            self.batches.no_backward_seen()
        self.end.step_ended()
        self.batches.step_ended()
        if self._missed:
            self._add_missed(self._missed)
        sampled, steps = self.sampled, self._steps
        now = self._phases.clock()
        self.cost.took(self.group_calls.step_ended(now))
        measures = self._choose(now, between)
        if self.progress.step_finished(now, skipped, phase, measures) or sampled.sampling:
            self._flush(now)
        following = steps.count + 1
        if following >= sampled.next_change and (measures or sampled.sampling or sampled.counting):
            sampled.begin(following, measures)
        self.group_calls.begin(now, measures)
        self.cost.step_ended(self.measured)
        self._measure_next(measures)

    def _flush(self, now: int) -> None:
        """Write the words of the last steps, and read what is read now and then."""
        sampled = self.sampled
        sampled.run(self.progress.flush)
        sampled.run(sampled.readings.step_ended)
        self.cost.report(now)

    # -- which steps are measured

    def _choose(self, now: int, between: bool) -> bool:
        """A step ends: whether the next one is measured."""
        budget, sampled = self.cost.budget, self.sampled
        measures, was_odd = self.cost.step_ends(now, self.measured)
        if budget is None:
            return True
        if not between:
            return self.measured
        if measures or self.search.on or self._needs_hooks:
            return True
        changes = self._steps.count + 2 >= sampled.next_change
        due = changes and not (sampled.sampling or sampled.counting)
        return sampled.acts or (budget.allows and (due or was_odd))

    def _measure_next(self, measures: bool) -> None:
        """The next step begins: its hooks are on, or they are off."""
        steps, was, amounts = self._steps, self.measured, self._work.amounts()
        # The first step of all has mostly been seen whole, and another one may never be.
        if was and (self._whole or not any(self._each)):
            pairs = zip(amounts, self._before, strict=True)
            self._each = Amounts._make(now - before for now, before in pairs)
        # Each thread counts its own, and another one may have taken over.
        if was and self._whole and (nodes := _autograd_nodes() - self._nodes_before) > 0:
            self._nodes_each = nodes
        self._before = amounts
        self._note_nodes()
        self._whole, self.measured, self._missed = measures, measures, 0
        steps.look = None if measures else self._looks
        if measures is not was:
            self.switch_hooks(measures)

    def count_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """In a step that is not measured, an optimizer has made its step; whether it ends ours.

        This looks at one step of many: `CountedSteps` has counted those before it.
        """
        if id(optimizer) not in self.end.known:
            return False
        now, steps = self._phases.clock(), self._steps
        # The thread's own clock takes longer to read than there is to measure, but for a flush.
        began_ns = thread_time_ns() if now >= self.progress.flush_due_ns else 0
        try:
            if not _only_fills_its_state():
                self._end_unseen(now, False)
                self.end.scaler_let = True
                if not self.measured:
                    self._count(steps.count + 1, optimizer)
        except errors.ANY_ERROR:
            self.failed("after the optimizer")
        if began_ns:
            self.cost.took(thread_time_ns() - began_ns)
        else:
            self.cost.decided(self._phases.clock() - now)
        return True

    def another_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """In a step that is not measured, another optimizer of a watched model has made a step."""
        self.progress.settle()
        made = self.end.another_stepped(optimizer, self._steps.count)
        if not self.end.known:
            # The one that ended our steps has gone.
            self.go_on_measured()
            self.optimizer_began(optimizer, False)
            self.optimizer_ended(optimizer)
        elif self.search.on or made > _MOST_OTHERS:
            self.go_on_measured()

    def _end_unseen(self, now: int, skipped: bool) -> None:
        """A step has ended whose hooks were off: it is taken to be like the last measured one."""
        steps, counted = self._steps, self.progress.counted
        if took_ns := counted.took_ns:
            counted.took_ns = 0
            self.cost.counted(took_ns)
        self.progress.go_on_uncounted()
        self._nodes_vary |= self._nodes_made() != self._nodes_each
        self._add_each()
        measures = self._choose(now, True)
        if self.progress.step_finished(now, skipped, None, measures):
            self._flush(now)
        if measures:
            following = steps.count + 1
            if following >= self.sampled.next_change:
                self.sampled.begin(following)
            self.group_calls.begin(now, True)
            self._measure_next(True)
        else:
            self._note_nodes()
            steps.look = self._looks
        if measures or self.cost.compares:
            self.cost.step_over(thread_time_ns())

    def _add_each(self) -> None:
        self._work.add(self._each)

    def _add_missed(self, times: int) -> None:
        """Hooks have not seen all of so many steps, which have ended: each was as usual."""
        found = zip(self._work.amounts(), self._before, self._each, strict=True)
        missed = (max(before + times * each - now, 0) for now, before, each in found)
        self._work.add(Amounts._make(missed))

    def _count(self, following: int, optimizer: torch.optim.Optimizer) -> None:
        """From this step on count those at whose ends there is nothing to decide."""
        if self.cost.compares or self.end.has_scaler or self.search.on:
            return
        # Torch steps an optimizer without a state to have it made.
        if (_CHECKPOINTS in sys.modules and not optimizer.state) or (
            self._logs and self._nodes_vary
        ):
            return
        usual_ns = max(self.cost.usual_ns, 1)
        until_flush = (self.progress.flush_due_ns - self.cost.ended_ns) // usual_ns
        until, due = following + min(_MOST_COUNTED, until_flush), self.sampled.next_change
        if due > following:
            until = min(until, due)
        coming = following + 1
        while coming < until and not in_sample(coming, self.cost.every):
            coming += 1
        if (left := coming - following - 1) > 0:
            known = self.end.known.get(id(optimizer))
            if known is not None:
                self.progress.count_steps(left, known, ODD * usual_ns, self._add_each)

    def scaler_updates(self, found: Any) -> None:
        """The scaler is about to be updated: it may have let the optimizer make no step."""
        if not self.end.scaler_skips(found):
            return
        if not self.measured:
            self._end_unseen(self._phases.clock(), skipped=True)
        elif self.end.backwards:
            self.act("the scaler", self._finish, True, None, not self.calls.forwards)

    def go_on_measured(self) -> None:
        """In the middle of a step that is not measured: from now on it is."""
        if self.measured:
            return
        self.progress.counted.stop()
        self._look()
        self._missed, self._before = int(self._steps.model_called), self._work.amounts()
        self.measured, self._steps.look = True, None
        self._phases.go_on_measured()
        self.switch_hooks(True)

    def model_comes(self) -> None:
        """A model may be called for the first time, and the step is to have all of it."""
        if _get_ident() == self.progress.thread:
            self.go_on_measured()

    def evaluates(self) -> None:
        """A watched model was put into evaluation mode."""
        if _get_ident() != self.progress.thread:
            return
        budget = self.cost.budget
        if budget is not None and not budget.is_exhausted:
            self.go_on_measured()

    def _look(self) -> None:
        """A value is logged while the hooks are off: whether a model was called in this step.

        Then there are nodes of autograd's. They are counted in each thread.
        """
        self.progress.settle()
        if _get_ident() != self.progress.thread or not self._nodes_each:
            return
        self._logs = True
        # A step may consist of several forwards: half of one is enough.
        if 2 * self._nodes_made() * max(self._each.forwards, 1) > self._nodes_each:
            self.progress.counted.stop()
            self._steps.look = None
            self._steps.begin_step()
            self._steps.model_called = True

    def _note_nodes(self) -> None:
        self._nodes_before, self._nodes_at = _autograd_nodes(), self._steps.count

    def _nodes_made(self) -> int:
        """The nodes of this step, if those that were counted before it have made as many each."""
        others = self._steps.count - self._nodes_at
        return _autograd_nodes() - self._nodes_before - others * self._nodes_each

    # -- loaders: a batch begins a step, or is the next one of the step that is open

    def load_began(self) -> None:
        """A loader is asked for the next batch."""
        calls = self.calls
        if not self.end.has_model:
            self.search.batch_wanted()
            return
        thread, trains = _get_ident(), self.progress.thread
        if trains != thread and is_another_thread(trains or self._made_in, thread):
            return  # a thread fetches ahead: training does not wait for that
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
        self.loads += 1
        self._phases.enter(calls.load)

    def load_ended(self) -> None:
        """The batch is there."""
        if _get_ident() == self.loads_in:
            self._phases.leave(self.calls.load)

    # -- models: where a forward begins, no older one is open

    def forward_began(
        self,
        watched: WatchedModel,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """A watched model is called."""
        calls, steps = self.calls, self._steps
        trains = module.training or watched.trains_in_eval
        if not trains and (inside := watched.inside()) is not None:
            trains = bool(inside.training)
        trains = trains and _is_grad_enabled()
        thread = _get_ident()
        if calls.is_beside_step(thread, trains):
            return
        if calls.in_backward:
            calls.close_what_raised()
        elif calls.forwards and thread != calls.forward_thread:
            calls.close_forward()
        if calls.in_backward or calls.forwards:
            # A model inside a model, or one that is computed again for the backward under way. What
            # is inside DDP begins once every rank has the same buffers.
            calls.forwards += 1
            self._phases.leave(self._buffers)
            return
        calls.forwards = 1
        calls.forward_thread = thread
        calls.trains = trains
        phases = self._phases
        if not trains:
            phases.enter(calls.eval)
            return
        self._evaluated = None
        self.progress.thread = thread
        # A forward inside an optimizer's step begins no other step: its closure has called the
        # model, and may do so again (LBFGS).
        if self._closure:
            phases.leave(self._optimizer)
        elif not steps.in_step or self.end.backwards:
            self._begin()
        steps.model_called = True
        phases.enter(calls.forward)
        if watched.syncs_buffers and module.will_sync_module_buffers():
            phases.enter(self._buffers)
        if watched.flops_per_unit is None:
            sampled = self.sampled
            sampled.run(sampled.readings.flops.forward_began, watched, module)
        batches = self.batches
        batches.model = batches.model or watched
        watched.counted = batches.model is watched and not watched.shared
        watched.take(args, kwargs, self.progress.work)
        batches.forward_begins(watched)

    def forward_ended(self, watched: WatchedModel, module: torch.nn.Module, output: Any) -> bool:
        """A watched model has returned, or raised; whether its outputs get the hook of backward."""
        calls, steps = self.calls, self._steps
        if _get_ident() != calls.forward_thread:
            return False
        if calls.forwards:
            calls.forwards -= 1
        if calls.forwards or calls.in_backward:
            return False
        if calls.trains:
            self._phases.leave(calls.forward)
            self._work.forwards += 1
            if not self._work.forwards % _OFTEN:
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
        if self.alive and self.measured:
            self.act("backward began", self._backward_began)

    def _backward_began(self) -> None:
        calls = self.calls
        if calls.in_backward:
            if not calls.backward_has_raised():
                return
            calls.close_backward()
        calls.in_backward = True
        calls.backward_id = current_backward()
        self._phases.enter(calls.backward)
        # Runs when the local gradients are done, and before DDP's own finaliser, which is queued
        # later; what that callback queues in turn runs after the finaliser.
        self._queue_callback(partial(self._in_backward, "gradients done", self._gradients_done))
        if self.sampled.wants_backward:
            self.sampled.run(self.sampled.readings.backward_began)

    def _in_backward(self, where: str, act: Callable[[], None]) -> None:
        if self.alive and self.measured:
            self.act(where, act)

    def _gradients_done(self) -> None:
        """The local gradients are there; DDP waits for those of the other ranks."""
        self._phases.enter(self.calls.wait)
        self._queue_callback(partial(self._in_backward, "backward ended", self._backward_ended))

    def _backward_ended(self) -> None:
        """The gradients of all ranks are there."""
        end = self.end
        # Closes the wait inside it as well.
        self.calls.close_backward()
        self._work.micro_batches += 1
        self.batches.backward_ended()
        end.backwards += 1
        if self._closure and self._optimizer not in self._phases.opened:
            self._phases.enter(self._optimizer)
        if end.backwards == _LONGEST_ACCUMULATION and not self._steps.count:
            self.sampled.readings.report()
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._finish()

    # -- optimizers: one at a time, and what another one does inside of a step is part of that step

    def optimizer_began(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer of a watched model begins its step. *closure*: which calls the model."""
        calls, end = self.calls, self.end
        # Asked only where something is open: Dynamo may trace this, and knows no threads.
        if calls.in_backward or calls.forwards:
            if calls.is_beside_step(_get_ident()):
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
        if self.calls.in_backward:
            # Another thread's may end while this backward is under way.
            if not outside_of_backward():
                self._stepped_in_backward = self._needs_hooks = True
            return
        if self._optimizing != id(optimizer):
            if self._optimizing is None and self.end.is_of(optimizer):
                # The step of a class above was a part of this one.
                self._needs_hooks = self._needs_hooks or not _only_fills_its_state()
            return
        # A closure has brought the gradients in the middle of the step.
        if self._closure:
            self._sample_optimizer(optimizer)
        self._optimizing = None
        self._closure = False
        self.replays = False
        ours = self.end.ended_by(optimizer, self._steps.count)
        if not ours:
            self._phases.leave(self._optimizer)
            return
        if not self._steps.count:
            self.sampled.run(self._resume, optimizer)
        if missed := self.end.missed:
            self._missed, self._whole = missed + 1, False
            self.progress.count_missed(missed)
        self._finish(False, self._optimizer, between=not self.calls.forwards)

    def _sample_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sampled.sampling and self.end.is_of(optimizer):
            self.sampled.run(self.sampled.readings.optimizer_steps, optimizer)

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step is over: a run that was resumed has made others before."""
        self._steps.resume_from(steps_made(optimizer) - 1)

    # -- compilation

    def compile_began(self, thread: int) -> None:
        """A graph is being compiled, in the middle of whatever needs it."""
        self.compiles = True
        self.progress.go_on_uncounted()
        calls = self.calls
        # Backward may compile in a thread of autograd's; other threads' compiling is not a step's.
        evaluates = calls.forwards and thread == calls.forward_thread
        if thread == self.progress.thread or calls.in_backward or evaluates:
            self._phases.enter(self._compile)

    def compile_ended(self) -> None:
        """It is compiled."""
        self._phases.leave(self._compile)

    # -- graphs of a device: what is captured does not run, and each replay runs all of it

    def capture_began(self) -> None:
        """From here on the training thread captures."""
        if self.progress.thread not in (0, _get_ident()):
            return
        self.progress.go_on_uncounted()
        self.go_on_measured()
        self._phases.enter(self._compile)
        self._is_capturing, self._captured_steps, self._open_captured = True, 0, 0

    def captures(self) -> bool:
        """Whether what hooks see now is captured. A capture that fails may have no end."""
        if self._is_capturing and not torch.cuda.is_current_stream_capturing():
            self.capture_ended()
        return self._is_capturing

    def optimizer_capture_began(self) -> None:
        """An optimizer of a watched model begins its step, which is captured."""
        self._open_captured += 1

    def optimizer_capture_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step is captured, and a part of each replay."""
        self._open_captured -= 1
        if not self._open_captured:
            self._captured_steps += self.end.is_of(optimizer) or not self.end.known

    def capture_ended(self) -> int:
        """The graph is captured; returns how many training steps it contains."""
        self._is_capturing, steps, self._captured_steps = False, self._captured_steps, 0
        self._phases.leave(self._compile)
        return steps

    def replay_began(self) -> None:
        """A graph that contains a step is about to be launched."""
        self.progress.thread = self.progress.thread or _get_ident()
        if self.progress.thread != _get_ident() or not self.measured:
            return
        if not self._steps.in_step or self.end.backwards:
            self._begin()
        self._steps.model_called = True
        self._phases.enter(self._graph)

    def replay_ended(self, steps: int) -> None:
        """It is launched. Its steps are taken to have the work of the last measured one."""
        if _get_ident() != self.progress.thread:
            return
        self.replays = True
        if steps > 1:
            self.progress.go_on_uncounted()
            self.progress.count_missed(steps - 1)
        if not self.measured:
            # At the last of its steps alone it is decided whether the next one is measured.
            for _ in range(steps - 1):
                self._add_each()
            self._end_unseen(self._phases.clock(), False)
            return
        self._missed, self._whole = steps, False
        self._finish(False, self._graph, between=not self.calls.forwards)


# Private, and looked up by name: a torch without it loses only what needs it.
_autograd_nodes: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)


def _only_fills_its_state() -> bool:
    """Whether a checkpoint steps this optimizer, to have its state made.

    Torch gives it gradients of zero for that, and a learning rate of zero.
    """
    if is_compiling():
        return False  # Dynamo knows no frames
    checkpoints = sys.modules.get(_CHECKPOINTS)
    code = getattr(getattr(checkpoints, "_init_optim_state", None), "__code__", None)
    return code is not None and times_called(sys._getframe(), code) > 0
