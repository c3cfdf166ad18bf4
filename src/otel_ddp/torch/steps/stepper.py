"""Divides training steps into phases, from the events that hooks report.

One stepper per process. Hooks report beginnings and ends at any moment; `failed` gets their
exceptions. If forward or backward raises, its end may not be reported: then the next beginning
closes the open phase.
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
from otel_ddp.recording.progress import Phase, Progress
from otel_ddp.recording.steps import Amounts
from otel_ddp.torch.inspection import CALL_MODULE, times_called
from otel_ddp.torch.steps.budget import ODD, Cost, SampledSteps, in_sample
from otel_ddp.torch.steps.group_calls import GroupCalls
from otel_ddp.torch.steps.open_step import (
    BackwardHook,
    OpenCalls,
    StepEnd,
    current_backward,
    is_another_thread,
    outside_of_backward,
    steps_made,
)
from otel_ddp.torch.steps.watched_model import Batches, WatchedModel

_FAILURES_ALLOWED = 3
# Check whether a flush is due every 16 forwards, as there may be many before a step ends.
_OFTEN = 16
# After this many backwards without a step, report that none is counted: gradient accumulation takes
# fewer.
_LONGEST_ACCUMULATION = 32 * _OFTEN
# Most consecutive steps that are only counted, without deciding whether to measure the next one.
_MOST_COUNTED = 64
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"
# If other optimizers make more steps than this within one training step, check whether the
# optimizer that ends training steps still exists.
_MOST_OTHERS = 20
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident
_T = TypeVar("_T")


class Stepper:
    """Receives the events of all hooks, and begins and ends steps and their phases."""

    def __init__(self, progress: Progress) -> None:
        self.alive = True
        self.progress = progress
        self.sampled = SampledSteps()
        self.calls = OpenCalls(progress)
        self.group_calls = GroupCalls(progress)
        self.end = StepEnd()
        self.batches = Batches(progress.work)
        # The search for models, which `discovery` sets and removes.
        self.search: Any = None
        # Whether the search is active; between two searches it waits for another optimizer.
        self.searching = False
        # Called if steps run without a call of the model that the user has passed.
        self.model_not_called: Callable[[], None] = lambda: None
        self.backward_hook = BackwardHook()
        self.backward_hook.call(self.gradient_arrived)
        self._steps, self._phases, self._work = progress.steps, progress.phases, progress.work
        self._optimizer = progress.phases.of_hooks("optimizer")
        self._buffers = progress.phases.of_hooks("comm_wait", of_buffers=True)
        self._compile = progress.phases.of_hooks("compile")
        self._graph = progress.phases.of_hooks("graph")
        self._queue_callback = Variable._execution_engine.queue_callback
        # The id of the optimizer that is in its step; and whether this step has a closure, a
        # function that calls the model.
        self._optimizing: int | None = None
        self._closure = False
        # Whether an optimizer has stepped inside the open backward.
        self._stepped_in_backward = False
        # The last model called in evaluation mode with gradients enabled, if no model was called in
        # training mode since. If a step ends now, this model is trained in evaluation mode.
        self._evaluated: WatchedModel | None = None
        # This thread counts as the training thread until a training forward shows which one it is:
        # mostly the training thread calls `instrument`, which creates this object.
        self._creator_thread = _get_ident()
        # How many batches were fetched; and the thread that fetched the last one.
        self.loads = self.load_thread = 0
        self.compiles = False
        # Whether the last step was replayed from a CUDA graph.
        self.replays = False
        # Whether a CUDA graph is being captured, and how many training steps it contains so far.
        self._is_capturing = False
        self._captured_steps = 0
        # How deep optimizer steps are nested in the capture: a subclass may call `super().step()`.
        self._open_captured = 0
        self._failures = 0
        # Whether the phases of the current step are measured. If not, the only hook that is on is
        # the post-step hook of optimizers.
        self.measured = True
        # Puts hooks on (True) or takes them off, between two steps.
        self.switch_hooks: Callable[[bool], None] = lambda on: None
        self.cost = Cost(progress, self.sampled, self.group_calls)
        # Whether the post-step hook alone would miss the ends of training steps, as when optimizers
        # step inside backward. Then all hooks stay on.
        self._needs_hooks = False
        # Whether the current step is measured from its beginning.
        self._measured_whole = False
        # If hooks saw only a part of the current step: how many times the usual work to assume, as
        # one step may stand for several (missed ones, or those of a replay).
        self._unseen_steps = 0
        # The work of the last fully measured step; and the total work when the previous step ended.
        self._usual_work = self._work_before = Amounts(0, 0, 0.0, 0, 0)
        # How many autograd nodes a measured step creates; autograd's sequence number at the end of
        # an earlier step; and the number of that step.
        self._usual_nodes = self._nodes_before = self._nodes_step = 0
        # Whether steps differ in their number of nodes; whether unmeasured steps log values.
        self._nodes_vary = self._logs_unmeasured = False
        # Bind this method once, as it is assigned in each step.
        self._catch_up_bound = self._catch_up

    def failed(self, where: str) -> None:
        """A hook raised. After three failures all hooks are switched off."""
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
        """Run a hook's action: contain its exceptions, and add its time to the cost."""
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
        """Stop measuring, in a forked child or at the end."""
        self.alive = False
        self.progress.counted.stop()
        self.group_calls.leave_to_parent()
        # Graphs that are still alive refer to this hook; it must not report to a later run.
        self.backward_hook.take_off()

    def stop(self) -> None:
        """Stop measuring, and close all phases."""
        self.leave_to_parent()
        self.group_calls.give_up()
        self.progress.settle()
        calls = self.calls
        for phase in (calls.forward, calls.eval, calls.backward, self._optimizer, calls.load):
            self._phases.leave(phase)
        self._steps.catch_up = None
        if not self.measured:
            self.measured = True
            self._phases.go_on_measured()
        self.progress.flush()

    def drop_references(self) -> None:
        """Drop references to the user's objects, as hooks keep this stepper alive for long."""
        self.end = StepEnd()
        self.search, self.model_not_called = None, lambda: None

    # -- steps

    def _begin(self) -> None:
        """Work of a step begins: begin a step, unless one is open."""
        # Close an optimizer's step that has raised: its end was not reported.
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
        """End a step, and *phase* with it. *between*: whether no call of a model is open, so that
        hooks may be switched."""
        if self._evaluated is not None:
            self._evaluated.trains_in_eval = True
        if not self.end.backwards:
            self.batches.no_backward_seen()
        self.end.step_ended()
        self.batches.step_ended()
        if self._unseen_steps:
            self._add_unseen_work(self._unseen_steps)
        sampled, steps = self.sampled, self._steps
        now = self._phases.clock()
        self.cost.took(self.group_calls.step_ended(now))
        measures = self._decide_measuring(now, between)
        if self.progress.step_finished(now, skipped, phase, measures) or sampled.sampling:
            self._flush(now)
        following = steps.count + 1
        if following >= sampled.next_change and (measures or sampled.sampling or sampled.counting):
            sampled.begin(following, measures)
        self.group_calls.begin(now, measures, sampled.counting)
        self.cost.step_ended(self.measured)
        self._measure_next(measures)

    def _flush(self, now: int) -> None:
        """Flush the journal words of the last steps, and take the periodic readings."""
        sampled = self.sampled
        sampled.run(self.progress.flush)
        sampled.run(sampled.readings.step_ended)
        self.cost.report(now)

    # -- which steps are measured

    def _decide_measuring(self, now: int, between: bool) -> bool:
        """Decide at the end of a step whether the next one is measured."""
        budget, sampled = self.cost.budget, self.sampled
        measures, was_odd = self.cost.step_ends(now, self.measured)
        if budget is None:
            return True
        if not between:
            return self.measured
        if measures or self.searching or self._needs_hooks:
            return True
        changes = self._steps.count + 2 >= sampled.next_change
        due = changes and not (sampled.sampling or sampled.counting)
        return sampled.acts_after_steps or (budget.allows and (due or was_odd))

    def _measure_next(self, measures: bool) -> None:
        """The next step begins: put its hooks on if it *measures*, else take them off."""
        steps, was, amounts = self._steps, self.measured, self._work.amounts()
        # After the first step, its work is the usual work, even if hooks did not see all of it:
        # there may be no other measured step.
        if was and (self._measured_whole or not any(self._usual_work)):
            pairs = zip(amounts, self._work_before, strict=True)
            self._usual_work = Amounts._make(now - before for now, before in pairs)
        # Sequence numbers are per thread: the difference is negative if another thread trains now.
        if was and self._measured_whole and (nodes := _autograd_nodes() - self._nodes_before) > 0:
            self._usual_nodes = nodes
        self._work_before = amounts
        self._note_nodes()
        self._measured_whole, self.measured, self._unseen_steps = measures, measures, 0
        steps.catch_up = None if measures else self._catch_up_bound
        if measures is not was:
            self.switch_hooks(measures)

    def count_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer has stepped in an unmeasured step; returns whether that ended a training
        step.

        Called at few of these steps, as `CountedSteps` counts most of them.
        """
        if id(optimizer) not in self.end.known:
            return False
        now, steps = self._phases.clock(), self._steps
        # Read the thread's clock only for a flush: two reads take longer than this hook.
        began_ns = thread_time_ns() if now >= self.progress.flush_due_ns else 0
        try:
            if not _only_fills_its_state():
                self._end_unmeasured(now, False)
                self.end.stepped_since_update = True
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
        """In an unmeasured step, another optimizer of a watched model has stepped."""
        self.progress.settle()
        made = self.end.another_stepped(optimizer, self._steps.count)
        if not self.end.known:
            # The optimizer that ended training steps is gone: this one takes over.
            self.go_on_measured()
            self.optimizer_began(optimizer, False)
            self.optimizer_ended(optimizer)
        elif self.searching or made > _MOST_OTHERS:
            self.go_on_measured()

    def _end_unmeasured(self, now: int, skipped: bool) -> None:
        """An unmeasured step has ended: add the work of the last measured one."""
        steps, counted = self._steps, self.progress.counted
        if took_ns := counted.took_ns:
            counted.took_ns = 0
            self.cost.counted(took_ns)
        self.progress.go_on_uncounted()
        self._nodes_vary |= self._nodes_made() != self._usual_nodes
        self._add_usual_work()
        measures = self._decide_measuring(now, True)
        if self.progress.step_finished(now, skipped, None, measures):
            self._flush(now)
        if measures:
            following = steps.count + 1
            if following >= self.sampled.next_change:
                self.sampled.begin(following)
            self.group_calls.begin(now, True, self.sampled.counting)
            self._measure_next(True)
        else:
            self._note_nodes()
            steps.catch_up = self._catch_up_bound
        if measures or self.cost.compares:
            self.cost.step_over(thread_time_ns())

    def _add_usual_work(self) -> None:
        self._work.add(self._usual_work)

    def _add_unseen_work(self, times: int) -> None:
        """Hooks missed a part of the last *times* steps: raise their work to the usual amount."""
        found = zip(self._work.amounts(), self._work_before, self._usual_work, strict=True)
        missed = (max(before + times * each - now, 0) for now, before, each in found)
        self._work.add(Amounts._make(missed))

    def _count(self, following: int, optimizer: torch.optim.Optimizer) -> None:
        """Only count the coming steps, up to the next one whose end needs a decision."""
        if self.cost.compares or self.end.has_scaler or self.searching:
            return
        # Two cases need this hook in each step. A checkpoint may step an optimizer only to create
        # its state. And `_catch_up` needs each step's nodes if values are logged and steps differ.
        if (_CHECKPOINTS in sys.modules and not optimizer.state) or (
            self._logs_unmeasured and self._nodes_vary
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
                self.progress.count_steps(left, known, ODD * usual_ns, self._add_usual_work)

    def scaler_updates(self, found: Any) -> None:
        """The gradient scaler is about to be updated. If it has skipped the optimizer's step, a
        training step ends."""
        if not self.end.scaler_skips(found):
            return
        if not self.measured:
            self._end_unmeasured(self._phases.clock(), skipped=True)
        elif self.end.backwards:
            self.act("the scaler", self._finish, True, None, not self.calls.forwards)

    def go_on_measured(self) -> None:
        """Measure the rest of the current, unmeasured step."""
        if self.measured:
            return
        self.progress.counted.stop()
        self._catch_up()
        self._unseen_steps, self._work_before = int(self._steps.model_called), self._work.amounts()
        self.measured, self._steps.catch_up = True, None
        self._phases.go_on_measured()
        self.switch_hooks(True)

    def model_comes(self) -> None:
        """A new model is about to be called: measure its first step as a whole."""
        if _get_ident() == self.progress.thread:
            self.go_on_measured()

    def evaluates(self) -> None:
        """A watched model was put into evaluation mode: measure that, if the budget allows."""
        if _get_ident() != self.progress.thread:
            return
        budget = self.cost.budget
        if budget is not None and not budget.is_exhausted:
            self.go_on_measured()

    def _catch_up(self) -> None:
        """A value is logged while hooks are off: find out whether this step has called a model.

        A model's forward creates autograd nodes, which advance the thread's sequence number.
        """
        self.progress.settle()
        if _get_ident() != self.progress.thread or not self._usual_nodes:
            return
        self._logs_unmeasured = True
        # Half the nodes of one forward show that a model was called; usual steps may have several.
        if 2 * self._nodes_made() * max(self._usual_work.forwards, 1) > self._usual_nodes:
            self.progress.counted.stop()
            self._steps.catch_up = None
            self._steps.begin_step()
            self._steps.model_called = True

    def _note_nodes(self) -> None:
        self._nodes_before, self._nodes_step = _autograd_nodes(), self._steps.count

    def _nodes_made(self) -> int:
        """Estimated autograd nodes of this step: those since `_note_nodes`, without the usual
        number of each whole step in between."""
        others = self._steps.count - self._nodes_step
        return _autograd_nodes() - self._nodes_before - others * self._usual_nodes

    # -- loaders: a batch begins a step, or is the next batch of the open one

    def load_began(self) -> None:
        """A loader fetches the next batch."""
        calls = self.calls
        if not self.end.has_model:
            if self.searching:
                self.search.between_calls()
            return
        thread, trains = _get_ident(), self.progress.thread
        if trains != thread and is_another_thread(trains or self._creator_thread, thread):
            return  # a prefetching thread, for which training does not wait
        if calls.in_backward:
            calls.close_failed_backward()
        in_forward = calls.forwards and not calls.in_backward
        if in_forward and not times_called(sys._getframe(), CALL_MODULE):
            calls.close_forward()
        if not calls.forwards:
            # No open forward is fetching this batch, so the batch may begin a step.
            if calls.in_backward:
                return
            if not self._steps.in_step or self.end.backwards:
                self._begin()
        self.load_thread = thread
        self.loads += 1
        self._phases.enter(calls.load)

    def load_ended(self) -> None:
        """The batch has arrived."""
        if _get_ident() == self.load_thread:
            self._phases.leave(self.calls.load)

    # -- models: a new forward closes any forward that an exception left open

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
        if calls.is_outside_step(thread, trains):
            return
        if calls.in_backward:
            calls.close_failed_backward()
        elif calls.forwards and thread != calls.forward_thread:
            calls.close_forward()
        if calls.in_backward or calls.forwards:
            # A nested model, or one that activation checkpointing recomputes in backward. If it is
            # the module inside a DDP, the DDP's broadcast of buffers, a phase, ends now.
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
        # A forward in an optimizer's closure begins no step: LBFGS calls its closure several times
        # per step.
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
        """A watched model's call has ended; returns whether to put the backward hook on its
        outputs."""
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
            # This model trains in evaluation mode, if the step has no call in training mode.
            self._evaluated = watched
        return False

    # -- backward: autograd calls these methods in any of its threads

    def gradient_arrived(self, gradient: torch.Tensor) -> None:
        """A gradient arrives at an output of a model: a backward has begun, unless one is open."""
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
        # Autograd runs these callbacks in order: first ours, when the local gradients are done;
        # then DDP's finalizer, queued later; last another of ours, which `_gradients_done` queues.
        self._queue_callback(partial(self._in_backward, "gradients done", self._gradients_done))
        if self.sampled.wants_backward:
            self.sampled.run(self.sampled.readings.backward_began)

    def _in_backward(self, where: str, act: Callable[[], None]) -> None:
        if self.alive and self.measured:
            self.act(where, act)

    def _gradients_done(self) -> None:
        """The local gradients are done; from now on DDP waits for gradients of other ranks."""
        self._phases.enter(self.calls.wait)
        self._queue_callback(partial(self._in_backward, "backward ended", self._backward_ended))

    def _backward_ended(self) -> None:
        """The gradients of all ranks are reduced."""
        end = self.end
        # This also ends the phase comm_wait, which is inside the phase backward.
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

    # -- optimizers: one at a time; a step inside another optimizer's step belongs to the outer one

    def optimizer_began(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer of a watched model begins its step. *closure*: whether it was given one."""
        calls, end = self.calls, self.end
        # Get the thread's id only if a call is open: Dynamo may trace this method, but cannot trace
        # calls of `threading`.
        if calls.in_backward or calls.forwards:
            if calls.is_outside_step(_get_ident()):
                return
            if calls.in_backward:
                calls.close_failed_backward()
        # Ignore an optimizer that steps inside backward (one per parameter): its time counts for
        # backward. Ignore an optimizer inside another one (ZeRO): its step is a part of the outer.
        open_one = self._optimizing
        if calls.in_backward or (open_one is not None and open_one != id(optimizer)):
            return
        if not end.backwards and _only_fills_its_state():
            return
        if calls.forwards:
            calls.close_forward()
        # If a step of the same optimizer is open, this step has raised, or the optimizer is a
        # subclass that calls `super().step()`.
        if open_one is not None or not self._steps.began:
            self._begin()
        self._optimizing = id(optimizer)
        self._closure = closure
        # With a closure, the phase begins later: first the closure runs forward and backward.
        if not closure or end.backwards:
            self._phases.enter(self._optimizer)
        if not end.known:
            end.choose(optimizer)
        if not closure:
            self._sample_optimizer(optimizer)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of a watched model has stepped."""
        if self.calls.in_backward:
            # Check the thread, as an optimizer of another thread may finish during this backward.
            if not outside_of_backward():
                self._stepped_in_backward = self._needs_hooks = True
            return
        if self._optimizing != id(optimizer):
            if self._optimizing is None and self.end.is_of(optimizer):
                # Its class calls `super().step()`: that inner step has ended the training step.
                self._needs_hooks = self._needs_hooks or not _only_fills_its_state()
            return
        # With a closure, sample the gradients now: they did not exist before the step.
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
            self._unseen_steps, self._measured_whole = missed + 1, False
            self.progress.count_missed(missed)
        self._finish(False, self._optimizer, between=not self.calls.forwards)

    def _sample_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sampled.sampling and self.end.is_of(optimizer):
            self.sampled.run(self.sampled.readings.optimizer_steps, optimizer)

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """After the first step: if the run was resumed, continue its earlier step numbers."""
        self._steps.resume_from(steps_made(optimizer) - 1)

    # -- compilation

    def compile_began(self, thread: int) -> None:
        """A compilation begins, at any point of a step."""
        self.compiles = True
        self.progress.go_on_uncounted()
        calls = self.calls
        # A compilation is a phase only if the training thread, a backward (in an autograd thread)
        # or an open forward waits for it. Those of other threads belong to no step.
        evaluates = calls.forwards and thread == calls.forward_thread
        if thread == self.progress.thread or calls.in_backward or evaluates:
            self._phases.enter(self._compile)

    def compile_ended(self) -> None:
        """The compilation is over."""
        self._phases.leave(self._compile)

    # -- CUDA graphs: captured work does not run during the capture, but in each replay

    def capture_began(self) -> None:
        """A thread begins to capture a graph: if it may train, this counts as a compilation."""
        if self.progress.thread not in (0, _get_ident()):
            return
        self.progress.go_on_uncounted()
        self.go_on_measured()
        self._phases.enter(self._compile)
        self._is_capturing, self._captured_steps, self._open_captured = True, 0, 0

    def captures(self) -> bool:
        """Whether calls are being captured now. This asks torch, too, as no hook may report the end
        of a failed capture."""
        if self._is_capturing and not torch.cuda.is_current_stream_capturing():
            self.capture_ended()
        return self._is_capturing

    def optimizer_capture_began(self) -> None:
        """An optimizer of a watched model begins its step in a capture."""
        self._open_captured += 1

    def optimizer_capture_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step is captured: each replay contains it."""
        self._open_captured -= 1
        if not self._open_captured:
            self._captured_steps += self.end.is_of(optimizer) or not self.end.known

    def capture_ended(self) -> int:
        """The graph is captured; returns how many training steps it contains."""
        self._is_capturing, steps, self._captured_steps = False, self._captured_steps, 0
        self._phases.leave(self._compile)
        return steps

    def replay_began(self) -> None:
        """A graph that contains training steps is about to be launched."""
        self.progress.thread = self.progress.thread or _get_ident()
        if self.progress.thread != _get_ident() or not self.measured:
            return
        if not self._steps.in_step or self.end.backwards:
            self._begin()
        self._steps.model_called = True
        self._phases.enter(self._graph)

    def replay_ended(self, steps: int) -> None:
        """The graph was launched. Each of its steps is assumed to do the usual work."""
        if _get_ident() != self.progress.thread:
            return
        self.replays = True
        if steps > 1:
            self.progress.go_on_uncounted()
            self.progress.count_missed(steps - 1)
        if not self.measured:
            # Whether to measure the next step is decided only after the graph's last step.
            for _ in range(steps - 1):
                self._add_usual_work()
            self._end_unmeasured(self._phases.clock(), False)
            return
        self._unseen_steps, self._measured_whole = steps, False
        self._finish(False, self._graph, between=not self.calls.forwards)


# Private in torch, so looked up by name. Without it, values logged while hooks are off may get the
# number of the previous step.
_autograd_nodes: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)


def _only_fills_its_state() -> bool:
    """Whether a checkpoint is stepping this optimizer to initialize its state.

    Torch does that with zero gradients and a learning rate of zero.
    """
    if is_compiling():
        return False  # Dynamo cannot trace frames
    checkpoints = sys.modules.get(_CHECKPOINTS)
    code = getattr(getattr(checkpoints, "_init_optim_state", None), "__code__", None)
    return code is not None and times_called(sys._getframe(), code) > 0
