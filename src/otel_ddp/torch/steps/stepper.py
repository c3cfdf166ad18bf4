"""Divides a training step into phases, from what hooks on models, optimizers and loaders report.

One stepper a process. Hooks call it at any moment, and hand to `failed` what it raises. They report
beginnings and ends, but an exception in forward or backward leaves out ends: whatever begins next
closes what is still open.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic_ns as _clock
from typing import Any

import torch
from torch.autograd import Variable
from torch.compiler import is_compiling

from otel_ddp.errors import containment
from otel_ddp.journal.writer import scratch_words
from otel_ddp.recording.progress import PHASE_WORD, Phase, Progress
from otel_ddp.torch.frames import CALL_MODULE, times_called
from otel_ddp.torch.steps.backward_hook import BackwardHook
from otel_ddp.torch.steps.open_calls import (
    OpenCalls,
    current_backward,
    is_another_thread,
    outside_of_backward,
)
from otel_ddp.torch.steps.sampled import SampledSteps
from otel_ddp.torch.steps.step_end import StepEnd, is_infinity, steps_made
from otel_ddp.torch.steps.watched_model import WatchedModel
from otel_ddp.torch.steps.workload import workload

_FAILURES_ALLOWED = 3
# After so many backwards without a step, no optimizer that we see will make one.
_LONGEST_ACCUMULATION = 500
_OFTEN = 16
# Public hook name -> the method that implements it.
_HOOKS = {
    "forward_began": "_forward_began",
    "buffers_arrived": "_buffers_arrived",
    "forward_ended": "_forward_ended",
    "on_gradient": "_gradient_arrived",
    "_on_gradients_done": "_gradients_done",
    "_on_backward_ended": "_backward_ended",
    "optimizer_began": "_optimizer_began",
    "optimizer_ended": "_optimizer_ended",
    "data_began": "_data_began",
    "data_ended": "_data_ended",
}
# Hugging Face's Trainer gives a model by this name the number to divide a step's losses by, which
# counts the items of other ranks and batches too.
_DIVISOR = "num_items_in_batch"
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident


def _only_fills_its_state() -> bool:
    """Whether a checkpoint steps this optimizer, to have its state made.

    Torch gives it gradients of zero for that, and a learning rate of zero.
    """
    if is_compiling():
        return False  # Dynamo knows no frames
    checkpoints = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(checkpoints, "_init_optim_state", None), "__code__", None)
    return code is not None and times_called(sys._getframe(), code) > 0


def _nothing() -> None:
    pass


class Stepper:
    """The phases of the step that is open. `step_end` decides when it ends."""

    forward_began: Callable[..., None]
    buffers_arrived: Callable[[], None]
    forward_ended: Callable[[WatchedModel, torch.nn.Module, Any], BackwardHook | None]
    on_gradient: Callable[[torch.Tensor], None]
    _on_gradients_done: Callable[[], None]
    _on_backward_ended: Callable[[], None]
    optimizer_began: Callable[[torch.optim.Optimizer, bool], None]
    optimizer_ended: Callable[[torch.optim.Optimizer], None]
    data_began: Callable[[], None]
    data_ended: Callable[[], None]

    def __init__(self, progress: Progress) -> None:
        self.alive = True
        self.progress = progress
        # The line of ours mostly stands in the thread that trains.
        self._made_in = _get_ident()
        # Another thread that had asked for a batch before it was known which one trains; 0: none.
        self._loaded_before = 0
        # Hooks that run in every step do what `enter` does by themselves: one more function is one
        # more microsecond, where training has filled the caches since the last step.
        self._open, self._words, self._write = progress.raw_writer()
        self._failures = 0
        self._calls = OpenCalls(progress)
        self.step_end = StepEnd()
        self.sampled = SampledSteps(progress)
        # Phases of ours, one each: none of them is ever inside itself.
        self._data = progress.hook_phase("data")
        self._forward = progress.hook_phase("forward")
        self._eval = progress.hook_phase("eval")
        self._backward = progress.hook_phase("backward")
        self._wait = progress.hook_phase("comm_wait")
        self._buffers = progress.hook_phase("comm_wait", of_buffers=True)
        self._optimizer = progress.hook_phase("optimizer")
        self._compile = progress.hook_phase("compile")
        self._stepped_in_backward = False
        self._optimizing: int | None = None  # the optimizer whose step is open, by its id
        self._closure = False  # whether that step was given a closure, which calls the model
        self._loading_thread = 0  # the one that asked for the last batch
        # Of several models that were found rather than named: the one whose batch is this step's.
        self._batch_model: WatchedModel | None = None
        self.counted_batch = True  # whether the last forward's batch was counted
        # A model in evaluation mode that was called with gradients on, and whether such a gradient
        # has arrived. Where a step follows, that is how this model trains.
        self._evaluated: WatchedModel | None = None
        self._evaluated_has_gradient = False
        # While no model is known, batches make no step.
        self.has_model = False
        # Set by the search for models.
        self.on_batch_without_model: Callable[[], None] = _nothing
        self.on_compile: Callable[[], None] = _nothing
        # Set for a model that was named: a step has ended, and no call of a model was seen.
        self.on_model_not_called: Callable[[], None] = _nothing
        self.wants_loss = False
        # Set where looking at each loss costs nothing: it lies in the memory of the host.
        self.check_loss: Callable[[WatchedModel, Any], None] | None = None
        # What was seen at all. Capabilities are read off it.
        self.forwards = self.backwards = self.steps = self.compiled_steps = self.loads = 0
        self.loads_elsewhere = self.closures = self.compiles = False
        self.float16 = False
        self._queue_callback = Variable._execution_engine.queue_callback
        self._backward_hook, self._evaluated_hook = BackwardHook(), BackwardHook()
        self._evaluated_hook.call(self._evaluated_gradient_arrived)
        self._wrap_hooks()

    def _wrap_hooks(self) -> None:
        """Make the public hooks, as the present step needs them."""
        # Made once: a bound method is a new object each time it is asked for.
        opened, wrap = self._open, self.sampled.wrap
        for name, method in _HOOKS.items():
            setattr(self, name, wrap(getattr(self, method), lambda: opened[-1].name))
        self._backward_hook.call(self.on_gradient)

    def failed(self, where: str) -> None:
        """A hook of ours raised: after three times all of them are switched off."""
        containment.record_failure(where)
        self._failures += 1
        if self.alive and self._failures >= _FAILURES_ALLOWED:
            self.stop()
            containment.log.warning(
                "The hooks of otel_ddp have failed %d times and measure no more steps; "
                "what you log is recorded as before.",
                _FAILURES_ALLOWED,
            )

    def stop(self) -> None:
        """Measure nothing more, and leave no phase open."""
        self.alive = False
        self.sampled.notify("forward_interrupted")
        for phase in (self._forward, self._eval, self._backward, self._optimizer, self._data):
            self.progress.leave(phase)
        self.progress.flush()
        self._words = scratch_words()

    # -- forward

    def _forward_began(
        self,
        watched: WatchedModel,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """A watched model is called."""
        calls = self._calls
        trains = (
            module.training or watched.trains_in_eval or (watched.is_ddp and module.module.training)
        ) and _is_grad_enabled()
        thread = _get_ident()
        if thread != calls.forward_thread and self._is_beside_step(thread, trains):
            return
        if calls.in_backward:
            self._close_what_raised()
        if calls.forwards or calls.in_backward:
            # A model inside a model, or one that is computed again for the backward under way.
            calls.forwards += 1
            return
        calls.forwards = 1
        calls.forward_thread = thread
        progress = self.progress
        if not trains:
            calls.trains = False
            progress.enter(self._eval)
            return
        calls.trains = progress.model_called = True
        self._evaluated = None
        if thread != progress.training_thread:
            progress.train_in(thread)
            self.loads_elsewhere |= self._loaded_before not in (0, thread)
            self._loaded_before = 0
        # A forward inside an optimizer's step begins no other step: its closure has called the
        # model, and may do so again (LBFGS).
        if self._closure:
            progress.leave(self._optimizer)
        elif not progress.in_step or self.step_end.backwards:
            self._begin_step()
        phase = self._forward
        self._open.append(phase)
        self._words[PHASE_WORD] = word = phase.base + _clock()
        self._write(word)
        if progress.device_clock is not None:
            progress.device_clock.mark(word)
        if watched.syncs_buffers and module.will_sync_module_buffers():
            progress.enter(self._buffers)
        self._count_batch(watched, module, args, kwargs)

    def _count_batch(
        self,
        watched: WatchedModel,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """Add a forward's samples, tokens and FLOPs to those of the step."""
        progress = self.progress
        samples, tokens = workload(args, kwargs)
        if type(samples) is not int or type(tokens) is not int:
            samples = tokens = 0  # traced: sizes are tensors, of no number
        if watched.found and self._batch_model is not watched and not self._tells_batch(watched):
            self.counted_batch = False
        else:
            progress.samples += samples
            progress.tokens += tokens
            self.counted_batch = True
        if self.wants_loss:
            watched.divided_loss = kwargs is not None and kwargs.get(_DIVISOR) is not None
        if (each := watched.flops_per_unit) is None:
            watched.samples, watched.tokens = samples, tokens
            self.sampled.notify("forward_began", watched, module)
        elif each:
            progress.flops += each * (samples if watched.by_samples else tokens or samples)

    def _tells_batch(self, watched: WatchedModel) -> bool:
        """Whether the step's batch is this model's: the first one that the step calls.

        An encoder and its decoder work on one batch.
        """
        if self._batch_model is None:
            self._batch_model = watched
        return self._batch_model is watched

    def evaluated_past_ddp(self, watched: WatchedModel, module: torch.nn.Module) -> bool:
        """Begin an evaluation if the module inside DDP is called directly; whether it is one."""
        calls = self._calls
        if calls.forwards or calls.in_backward or (module.training and _is_grad_enabled()):
            return False
        self.forward_began(watched, module, (), None)
        return calls.forwards > 0

    def _buffers_arrived(self) -> None:
        """DDP has given every rank the same buffers; the model itself begins."""
        if _get_ident() == self._calls.forward_thread:
            self.progress.leave(self._buffers)

    def _forward_ended(
        self, watched: WatchedModel, module: torch.nn.Module, output: Any
    ) -> BackwardHook | None:
        """A watched model has returned, or raised; the hook that its outputs are to get."""
        calls = self._calls
        if _get_ident() != calls.forward_thread:
            return None
        if calls.forwards:
            calls.forwards -= 1
        if calls.forwards or calls.in_backward:
            return None
        if calls.trains:
            opened, progress = self._open, self.progress
            if opened[-1] is self._forward:
                opened.pop()
                around = opened[-1]
                self._words[PHASE_WORD] = word = around.base + _clock()
                self._write(word)
                if progress.device_clock is not None:
                    progress.device_clock.mark(word)
            else:
                progress.leave(self._forward)
            self.forwards += 1
            if not self.forwards % _OFTEN:
                progress.flush_if_due()
            if self.check_loss is not None:
                self.check_loss(watched, output)
            if self.wants_loss or watched.flops_per_unit is None:
                self.sampled.notify("forward_ended", watched, module, output)
            return self._backward_hook
        self.progress.leave(self._eval)
        self.progress.flush_if_due()
        if not _is_grad_enabled():
            return None
        self._evaluated, self._evaluated_has_gradient = watched, False
        return self._evaluated_hook

    def forward_in_another_thread(self) -> bool:
        """Whether another thread is in a watched model: this one may be calling parts of it."""
        return self._calls.forward_in_another_thread()

    def _is_beside_step(self, thread: int, trains: bool) -> bool:
        """Whether a forward that begins is no part of the step; if it is, it ends an older one."""
        calls = self._calls
        if calls.is_beside_step(thread, trains):
            return True
        if calls.forwards and not calls.in_backward:
            self._close_forward()
        return False

    # -- backward

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        """The first gradient of a backward: autograd calls this in whatever thread it works."""
        if not self.alive:
            return
        try:
            calls = self._calls
            if calls.in_backward:
                if not calls.backward_has_raised():
                    return
                self._close_backward()
            calls.in_backward = True
            calls.backward_id = current_backward()
            phase = self._backward
            self._open.append(phase)
            self._words[PHASE_WORD] = word = phase.base + _clock()
            self._write(word)
            if (device := self.progress.device_clock) is not None:
                device.mark(word)
            # Runs when the local gradients are done, and before DDP's own finaliser, which is
            # queued later; what that callback queues in turn runs after the finaliser.
            self._queue_callback(self._on_gradients_done)
        except containment.ANY_ERROR:
            self.failed("backward began")

    def _evaluated_gradient_arrived(self, gradient: torch.Tensor) -> None:
        """A gradient of a model in evaluation mode: of training, or of an attack on its inputs."""
        self._evaluated_has_gradient = True

    def _gradients_done(self) -> None:
        """The local gradients are there; DDP waits for those of the other ranks."""
        try:
            phase = self._wait
            self._open.append(phase)
            self._words[PHASE_WORD] = word = phase.base + _clock()
            self._write(word)
            if (device := self.progress.device_clock) is not None:
                device.mark(word)
            self._queue_callback(self._on_backward_ended)
        except containment.ANY_ERROR:
            self.failed("gradients done")

    def _backward_ended(self) -> None:
        """The gradients of all ranks are there."""
        try:
            self._calls.in_backward = False
            self._calls.forwards = 0
            # Closes the wait inside it as well.
            self.progress.leave(self._backward)
            self.progress.micro_batches += 1
            self.backwards += 1
            self.step_end.backwards = since_step = self.step_end.backwards + 1
            if self._closure and self._optimizer not in self._open:
                self.progress.enter(self._optimizer)
            if since_step % _OFTEN == 0:
                self.progress.flush_if_due()
            if self.backwards == _LONGEST_ACCUMULATION and not self.steps:
                self.sampled.listener.no_step_ended()
            if self._stepped_in_backward:
                self._stepped_in_backward = False
                self._end_step()
        except containment.ANY_ERROR:
            self.failed("backward ended")

    # -- optimizer

    def _optimizer_began(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer of a watched model begins its step. *closure*: which calls the model."""
        calls = self._calls
        # Asked only where something is open: Dynamo may trace this, and knows no threads.
        if (calls.in_backward or calls.forwards) and calls.another_thread_works(_get_ident()):
            return
        if calls.in_backward:
            self._close_what_raised()
        # One optimizer a parameter, inside backward: that time stays backward. An optimizer inside
        # another (ZeRO's) is part of that one's step.
        if calls.in_backward or self._optimizing not in (None, id(optimizer)):
            return
        if not self.step_end.backwards and _only_fills_its_state():
            return
        if calls.forwards:
            self._close_forward()
        # The same one again: the last time it has raised, or this is the step of a class above.
        if self._optimizing is not None or not self.progress.steps_began:
            self._begin_step()
        self._optimizing = id(optimizer)
        self._closure = closure
        if closure and not self.step_end.backwards:
            # Its closure has the loop's own work in it, up to the end of backward.
            self.closures = True
        else:
            phase = self._optimizer
            self._open.append(phase)
            self._words[PHASE_WORD] = word = phase.base + _clock()
            self._write(word)
            if (device := self.progress.device_clock) is not None:
                device.mark(word)
        if self.step_end.begun_by(optimizer) and self.sampled.sampling and not closure:
            self.sampled.notify("optimizer_steps", optimizer)

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of a watched model has finished its step."""
        if self._calls.in_backward:
            # Another thread's may end while this backward is under way.
            if not outside_of_backward():
                self._stepped_in_backward = True
            return
        if self._optimizing != id(optimizer):
            return
        # A closure has brought the gradients in the middle of the step.
        if self._closure and self.sampled.sampling and self.step_end.is_of(optimizer):
            self.sampled.notify("optimizer_steps", optimizer)
        self._optimizing = None
        self._closure = False
        if not self.step_end.ended_by(optimizer):
            self.progress.leave(self._optimizer)
            return
        if not self.progress.step_count:
            self.sampled.run("resume", self._resume, optimizer)
        found = getattr(optimizer, "found_inf", None)
        self._end_step(found is not None and is_infinity(found), self._optimizer)

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step is over: a run that was resumed has made others before."""
        self.progress.resume_from(steps_made(optimizer) - 1)

    # -- data

    def _data_began(self) -> None:
        """A loader is asked for the next batch."""
        if not self.has_model:
            self.on_batch_without_model()
            return
        calls, thread = self._calls, _get_ident()
        trains = self.progress.training_thread
        if is_another_thread(trains or self._made_in, thread):
            # Before the first forward, this may be the thread that will train.
            self.loads_elsewhere |= trains != 0
            self._loaded_before = thread
            return  # a thread fetches ahead: training does not wait for that
        if thread != calls.forward_thread and calls.another_thread_works(thread):
            return
        if calls.in_backward:
            self._close_what_raised()
        in_forward = calls.forwards and not calls.in_backward
        if in_forward and not times_called(sys._getframe(), CALL_MODULE):
            self._close_forward()
        if calls.forwards:
            # A model that fetches its batches by itself.
            self._load(thread)
        elif not calls.in_backward:
            end = self.step_end
            if not self.progress.in_step or end.backwards or end.compiled.stepped:
                self._begin_step()
            self._load(thread)

    def _load(self, thread: int) -> None:
        self._loading_thread = thread
        self.loads += 1
        self.progress.enter(self._data)

    def _data_ended(self) -> None:
        """The batch is there."""
        if _get_ident() == self._loading_thread:
            self.progress.leave(self._data)
            if not self.loads % _OFTEN:
                self.progress.flush_if_due()

    # -- compilation

    def compile_began(self, thread: int) -> None:
        """A graph is being compiled, in the middle of whatever needs it."""
        self.compiles = True
        calls = self._calls
        # Backward may compile in a thread of autograd's; other threads' compiling is not a step's.
        evaluates = calls.forwards and thread == calls.forward_thread
        if thread == self.progress.training_thread or calls.in_backward or evaluates:
            self.progress.enter(self._compile)

    def compile_ended(self) -> None:
        """It is compiled."""
        self.progress.leave(self._compile)

    # -- what was left open

    def _close_forward(self) -> None:
        """End a forward that Ctrl-C or sys.exit has left: torch calls no hook then."""
        self._calls.forwards = 0
        self.progress.leave(self._forward)
        self.progress.leave(self._eval)
        self.sampled.listener.forward_interrupted()

    def _close_what_raised(self) -> None:
        """End a backward that has raised: only forward has a hook for its end in any case."""
        if outside_of_backward():
            self._close_backward()

    def _close_backward(self) -> None:
        self._calls.close()
        self.progress.leave(self._backward)

    # -- the step

    def new_model(self, found: bool = False) -> None:
        """A model has come, or come again. *found*: it was not named."""
        self.has_model = True
        if found:
            self.step_end.model_found()
        else:
            self.step_end.new_model()

    def _begin_step(self) -> None:
        # An optimizer that raised has not reported its end.
        if self._optimizing is not None:
            self._optimizing = None
            self._closure = False
            self.progress.leave(self._optimizer)
        # Work begins again after a backward, and no optimizer made a step of it: more of the same
        # step, unless the scaler has seen to it that none was made.
        if self.step_end.scaler_skipped():
            self._end_step(skipped=True)
        if self.step_end.compiled_stepped():
            self.compiled_steps += 1
            self._end_step()
        if not self.progress.in_step:
            if not self.progress.steps_began:
                self.sampled.listener.first_step_began()
            self.progress.begin_step()

    def _end_step(self, skipped: bool = False, phase: Phase | None = None) -> None:
        """The step is over, and so is *phase*."""
        if self._evaluated is not None and self._evaluated_has_gradient:
            self._evaluated.trains_in_eval = True
        self.step_end.step_ended()
        self._batch_model = None
        self.steps += 1
        progress, sampled = self.progress, self.sampled
        if progress.step_finished(skipped, phase) or sampled.sampling:
            sampled.run("flush", progress.flush)
            sampled.notify("step_ended")
        following = progress.step_count + 1
        if following >= sampled.next_change:
            sampled.begin(following)
            self._wrap_hooks()
