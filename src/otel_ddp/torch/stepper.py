"""Divides a training step into phases, from what the hooks of model and optimizer tell."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from time import monotonic_ns as _clock
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch.autograd import Variable
from torch.compiler import is_compiling

from otel_ddp import containment
from otel_ddp.journal.writer import scratch
from otel_ddp.recording.progress import PHASE_WORD, Phase, Progress
from otel_ddp.torch.readings.workload import workload

_FAILURES_ALLOWED = 3
# After so many steps of other optimizers, each with a backward of its own, that one ends ours;
# after so many backwards without any step, there is none that we hear.
_PATIENCE = 10
_LONGEST_ACCUMULATION = 500
_OFTEN = 16
# What hooks call, and what it is that is called.
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
_OURS = "otel_ddp"
# How Hugging Face's Trainer tells a model by what all of a step's losses are divided, those of
# other ranks and batches too.
_DIVISOR = "num_items_in_batch"
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident
_MAIN = threading.main_thread().ident or 0

# Private, and asked for by name so that a torch without them costs only what they are for.
_current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_RUN_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", 0)
_CALL_MODULE = torch.nn.Module._wrapped_call_impl.__code__


def _outside_of_backward() -> bool:
    """Whether this thread is surely not working for a backward."""
    return _current_backward() == -1


def calls(frame: FrameType | None, code: Any) -> int:
    """How often this is being called on the way to a frame."""
    found = 0
    while frame is not None:
        found += frame.f_code is code
        frame = frame.f_back
    return found


def _backward_is_under_way() -> bool:
    """Whether any thread is in a backward: whoever has asked for it stands in there."""
    if not _RUN_BACKWARD:
        return True
    return any(calls(frame, _RUN_BACKWARD) for frame in sys._current_frames().values())


def _only_fills_its_state() -> bool:
    """Whether this step of an optimizer is that of a checkpoint, which wants its state to be there.

    Torch gives it gradients of zero for that, and a learning rate of zero.
    """
    if is_compiling():
        return False  # Dynamo knows no frames
    checkpoints = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(checkpoints, "_init_optim_state", None), "__code__", None)
    return code is not None and calls(sys._getframe(), code) > 0


def _infinities(found: Any) -> bool:
    """Whether a fused optimizer was told by its scaler to leave the weights alone."""
    # On a device nobody knows yet, and nobody waits for it.
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found.item())


def _steps_made(optimizer: torch.optim.Optimizer) -> int:
    """How many steps an optimizer's own state counts, those before a checkpoint too; 1 at least.

    Adam and its like count. A count on a device is not asked for: that would wait for the device.
    """
    count: Any = next((state["step"] for state in optimizer.state.values() if "step" in state), 1)
    on_host = type(count) is torch.Tensor and count.device.type == "cpu" and count.numel() == 1
    return max(1, int(count)) if on_host or isinstance(count, int) else 1


def _nothing(*args: Any) -> None:
    pass


class BackwardHook:
    """Lends its hook to the nodes that gave a model's outputs: those are left as they are."""

    __slots__ = ("_hooks", "hook", "tensor")

    def __init__(self) -> None:
        self.tensor = torch.empty(0, requires_grad=True)
        self._hooks: OrderedDict[str, Any] = OrderedDict()
        self.tensor._backward_hooks = self._hooks
        self.hook: Callable[[torch.Tensor], None] = _nothing

    def hears(self, hook: Callable[[torch.Tensor], None]) -> None:
        """From here on call this one, also where the ear is lent already."""
        self.hook = self._hooks[_OURS] = hook


class InGraph:
    """What an optimizer leaves behind whose step is compiled: its hooks can do no more there."""

    def __init__(self) -> None:
        self.stepped = False


class Stepper:
    """One a process. Called by hooks at any moment; what it raises is caught by `failed`.

    Hooks tell beginnings and ends, but an exception in forward or backward leaves ends untold:
    whatever begins next closes what is still open.
    """

    forward_began: Callable[..., None]
    buffers_arrived: Callable[[], None]
    forward_ended: Callable[[Any, torch.nn.Module, Any], BackwardHook | None]
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
        # Hooks that come in every step do what `enter` does by themselves: a function more is a
        # microsecond more, where training has filled the caches since the last step.
        self._open, self._words, self._write = progress.raw_writer()
        self._failures = 0
        self._failed_aside: dict[str, int] = {}
        self._tell: Callable[[], None] = progress.flush
        # Phases of ours, one each: none of them is ever inside itself.
        self._data = progress.hook_phase("data")
        self._forward = progress.hook_phase("forward")
        self._eval = progress.hook_phase("eval")
        self._backward = progress.hook_phase("backward")
        self._wait = progress.hook_phase("comm_wait")
        self._buffers = progress.hook_phase("comm_wait", of_buffers=True)
        self._optimizer = progress.hook_phase("optimizer")
        self._compile = progress.hook_phase("compile")
        self._inside = 0  # forwards of watched models that are open, one inside the other
        self._training = False
        self._session = False  # one backward at a time, of whatever models
        self._stepped_in_backward = False
        self._optimizing: int | None = None  # the optimizer whose step is open, by its id
        self._evaluating = False  # whether that step was given a closure, which calls the model
        # The thread of the last forward; `standing` knows that of the last one that trained. What
        # others do to the models while one of these is at work is no part of the step.
        self._holder = 0
        self._loading = 0  # the thread that asked for the last batch
        # Of several models that were found rather than named, the one whose batch is this step's.
        self._fed: Any = None
        self.fed_last = True  # whether the last forward's batch was counted
        self._task = -1  # the backward of the session, as autograd numbers them
        # A model in evaluation mode that was called with gradients on; and whether such a gradient
        # has come. Where a step follows, that is how this model trains.
        self._doubted: Any = None
        self._doubted_backward = False
        # The optimizer whose step ends ours, by its id: the one that the user names, else the first
        # one seen; when it is gone, or idle for long, the next.
        self._step_optimizer: dict[int, Callable[[], torch.optim.Optimizer | None]] = {}
        self._named = False
        self._unstepped = 0  # backwards since the last step
        self._steps_of_others = 0  # of optimizers that end no step of ours, since then
        # Who is told of what, now and then: `Readings` puts itself here.
        self.on_first_step: Callable[[], None] = _nothing
        self.after_step: Callable[[], None] = _nothing
        self.stuck: Callable[[], None] = _nothing
        self.before_optimizer: Callable[[torch.optim.Optimizer], None] = _nothing
        self.on_interrupted: Callable[[], None] = _nothing
        self.on_forward: Callable[[Any, torch.nn.Module], None] = _nothing
        self.on_output: Callable[[Any, torch.nn.Module, Any], None] = _nothing
        self.before_counting: Callable[[], None] = _nothing
        self.counted: Callable[[str], None] = _nothing
        # Where the model is looked for: batches that are loaded before it is known make no step.
        self.has_model = False
        self.before_model: Callable[[], None] = _nothing
        self.before_compile: Callable[[], None] = _nothing
        self.after_counting: Callable[[], None] = _nothing
        self.wants_loss = False
        # Where there is a scaler: what it keeps of its present round, another object after each
        # update. That is known on the host; nothing of the device is asked.
        self.scaling: Callable[[], Any] | None = None
        self._round: Any = None
        self._stepped_round: Any = None
        self.in_graph = InGraph()
        # Every so many steps one is looked at closely.
        self.every = 100
        self._closely = False
        # And in some it is counted what is put in line in which phase.
        self.count_at = -1
        self._counting = False
        self._aside_s = 0.0
        # What was seen at all. Capabilities are read off it.
        self.forwards = self.backwards = self.steps = self.steps_in_graph = self.loads = 0
        self.loads_elsewhere = self.closures = False
        self.float16 = False
        self._queue_callback = Variable._execution_engine.queue_callback
        self._ear, self._doubtful_ear = BackwardHook(), BackwardHook()
        self._doubtful_ear.hears(self._doubtful_gradient_arrived)
        self._prepare()

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
        self._aside("on_interrupted")
        for phase in (self._forward, self._eval, self._backward, self._optimizer, self._data):
            self.progress.leave(phase)
        self.progress.flush()
        self._words = scratch()

    # -- forward

    def _forward_began(
        self,
        watched: Any,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """A watched model is called."""
        training = (
            module.training or watched.trains_in_eval or (watched.is_ddp and module.module.training)
        ) and _is_grad_enabled()
        if (thread := _get_ident()) != self._holder and self._elsewhere(thread, training):
            return
        if self._session:
            self._close_what_raised()
        if self._inside or self._session:
            # A model inside a model, or one that is computed again for the backward under way.
            self._inside += 1
            return
        self._inside = 1
        self._holder = thread
        progress = self.progress
        if not training:
            self._training = False
            progress.enter(self._eval)
            return
        self._training = progress.model_called = True
        self._doubted = None
        if thread != progress.training_thread:
            progress.training_thread = thread
        # A forward inside an optimizer's step begins no other one: its closure has called us, once
        # more perhaps (LBFGS).
        if self._evaluating:
            progress.leave(self._optimizer)
        elif not progress.in_step or self._unstepped:
            self._begin_step()
        phase = self._forward
        self._open.append(phase)
        self._words[PHASE_WORD] = word = phase.base + _clock()
        self._write(word)
        if progress.device_clock is not None:
            progress.device_clock.mark(phase.code)
        if watched.syncs_buffers and module.will_sync_module_buffers():
            progress.enter(self._buffers)
        samples, tokens = workload(args, kwargs)
        if type(samples) is not int or type(tokens) is not int:
            samples = tokens = 0  # traced: sizes are tensors, of no number
        if watched.found and self._fed is not watched and not self._feeds(watched):
            self.fed_last = False
        else:
            progress.samples += samples
            progress.tokens += tokens
            self.fed_last = True
        if self.wants_loss:
            watched.divided_loss = kwargs is not None and kwargs.get(_DIVISOR) is not None
        if (each := watched.flops_per_unit) is None:
            watched.samples, watched.tokens = samples, tokens
            self._aside("on_forward", watched, module)
        elif each:
            progress.flops += each * (samples if watched.by_samples else tokens or samples)

    def _feeds(self, watched: Any) -> bool:
        """Whether a step's batch is told by this model, as it is by the first that it calls.

        An encoder and its decoder work on one batch.
        """
        if self._fed is None:
            self._fed = watched
        return self._fed is watched

    def evaluated_by_itself(self, watched: Any, module: torch.nn.Module) -> bool:
        """The module inside of DDP is called: whether that is an evaluation past DDP."""
        if self._inside or self._session or (module.training and _is_grad_enabled()):
            return False
        self.forward_began(watched, module, (), None)
        return self._inside > 0

    def _buffers_arrived(self) -> None:
        """DDP has given every rank the same buffers; the model itself begins."""
        if _get_ident() == self._holder:
            self.progress.leave(self._buffers)

    def _forward_ended(
        self, watched: Any, module: torch.nn.Module, output: Any
    ) -> BackwardHook | None:
        """A watched model has returned, or raised; what is to listen to its outputs."""
        if _get_ident() != self._holder:
            return None
        if self._inside:
            self._inside -= 1
        if self._inside or self._session:
            return None
        if self._training:
            opened, progress = self._open, self.progress
            if opened[-1] is self._forward:
                opened.pop()
                around = opened[-1]
                self._words[PHASE_WORD] = word = around.base + _clock()
                self._write(word)
                if progress.device_clock is not None:
                    progress.device_clock.mark(around.code)
            else:
                progress.leave(self._forward)
            self.forwards += 1
            if not self.forwards % _OFTEN:
                progress.flush_if_due()
            if self.wants_loss or watched.flops_per_unit is None:
                self._aside("on_output", watched, module, output)
            return self._ear
        self.progress.leave(self._eval)
        self.progress.flush_if_due()
        if not _is_grad_enabled():
            return None
        self._doubted, self._doubted_backward = watched, False
        return self._doubtful_ear

    # -- backward

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        """The first gradient of a backward: autograd calls this in whatever thread it works."""
        if not self.alive:
            return
        try:
            if self._session and not self._session_has_raised():
                return
            self._session = True
            self._task = _current_backward()
            phase = self._backward
            self._open.append(phase)
            self._words[PHASE_WORD] = word = phase.base + _clock()
            self._write(word)
            if (device := self.progress.device_clock) is not None:
                device.mark(phase.code)
            # Runs when the local gradients are done, and before DDP's own finaliser, which is
            # queued later; what that callback queues in turn runs after the finaliser.
            self._queue_callback(self._on_gradients_done)
        except containment.ANY_ERROR:
            self.failed("backward began")

    def _doubtful_gradient_arrived(self, gradient: torch.Tensor) -> None:
        """One of a model in evaluation mode: of training, or of an attack on its inputs."""
        self._doubted_backward = True

    def _session_has_raised(self) -> bool:
        """Whether another backward is under way than that of the session, and not inside of it."""
        if _current_backward() == self._task or _get_ident() != self.progress.training_thread:
            return False
        if calls(sys._getframe(), _RUN_BACKWARD) != 1:
            return False
        self._close_session()
        return True

    def _gradients_done(self) -> None:
        try:
            phase = self._wait
            self._open.append(phase)
            self._words[PHASE_WORD] = word = phase.base + _clock()
            self._write(word)
            if (device := self.progress.device_clock) is not None:
                device.mark(phase.code)
            self._queue_callback(self._on_backward_ended)
        except containment.ANY_ERROR:
            self.failed("gradients done")

    def _backward_ended(self) -> None:
        try:
            self._session = False
            self._inside = 0
            # Takes the wait inside it along.
            self.progress.leave(self._backward)
            self.progress.micro_batches += 1
            self._unstepped += 1
            self.backwards += 1
            if self._evaluating and self._optimizer not in self._open:
                self.progress.enter(self._optimizer)
            if self._unstepped % _OFTEN == 0:
                self.progress.flush_if_due()
            if self.backwards == _LONGEST_ACCUMULATION and not self.steps:
                self.stuck()
            if self._stepped_in_backward:
                self._stepped_in_backward = False
                self._finish_step()
        except containment.ANY_ERROR:
            self.failed("backward ended")

    # -- optimizer

    @property
    def step_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose step ends ours, if one is known and still there."""
        return next((known() for known in list(self._step_optimizer.values())), None)

    def ends_steps(self, optimizer: torch.optim.Optimizer, named: bool = False) -> None:
        """From here on this optimizer's step ends ours."""
        self._named = named
        known: dict[int, Any] = {}
        # Held weakly: its state may be most of the memory of a device. No function of Python's is
        # told of its end: what a signal handler raises in one is lost.
        known[id(optimizer)] = containment.attempt(
            lambda: ref(optimizer, partial(known.pop, id(optimizer))), _nothing
        )
        self._step_optimizer = known

    def another_model(self) -> None:
        """A model has come, or come again: it may have another optimizer than the last one."""
        self.has_model = True
        if not self._named:
            self._step_optimizer = {}

    def _optimizer_began(self, optimizer: torch.optim.Optimizer, evaluating: bool) -> None:
        """An optimizer of a watched model begins its step."""
        # Asked only where something is open: Dynamo may trace this, and knows no threads.
        if (self._session or self._inside) and self._at_work(_get_ident()):
            return
        if self._session:
            self._close_what_raised()
        # One optimizer a parameter, inside backward: that time stays backward. One inside another
        # (ZeRO's) is part of it.
        if self._session or self._optimizing not in (None, id(optimizer)):
            return
        if not self._unstepped and _only_fills_its_state():
            return
        if self._inside:
            self._close_forward()
        # The same one again: the last time it has raised, or this is the step of a class above.
        if self._optimizing is not None or not self.progress.steps_began:
            self._begin_step()
        self._optimizing = id(optimizer)
        self._evaluating = evaluating
        if evaluating and not self._unstepped:
            # Its closure has the loop's own work in it, up to the end of backward.
            self.closures = True
        else:
            phase = self._optimizer
            self._open.append(phase)
            self._words[PHASE_WORD] = word = phase.base + _clock()
            self._write(word)
            if (device := self.progress.device_clock) is not None:
                device.mark(phase.code)
        # The first one seen closes the step; another one (a GAN's second) is part of the next
        # step, which has just as much of it.
        if not self._step_optimizer:
            self.ends_steps(optimizer)
        if self._closely and not evaluating and id(optimizer) in self._step_optimizer:
            self._aside("before_optimizer", optimizer)

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of a watched model has finished its step."""
        if self._session:
            # Another thread's may end while this backward is under way.
            if not _outside_of_backward():
                self._stepped_in_backward = True
            return
        if self._optimizing != id(optimizer):
            return
        # A closure has brought the gradients in the middle of the step.
        if self._closely and self._evaluating and id(optimizer) in self._step_optimizer:
            self._aside("before_optimizer", optimizer)
        self._optimizing = None
        self._evaluating = False
        if id(optimizer) not in self._step_optimizer:
            self._steps_of_others += 1
            patient = min(self._unstepped, self._steps_of_others) < _PATIENCE
            if not patient and not self._named:
                self.ends_steps(optimizer)
        if id(optimizer) not in self._step_optimizer:
            self.progress.leave(self._optimizer)
            return
        if not self.progress.step_count:
            self._aside("_go_on", optimizer)
        if self.scaling is not None:
            self._stepped_round = self.scaling()
        found = getattr(optimizer, "found_inf", None)
        self._finish_step(found is not None and _infinities(found), self._optimizer)

    def _go_on(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step is over: a run that was resumed has made others before."""
        self.progress.resume_from(_steps_made(optimizer) - 1)

    # -- data

    def _data_began(self) -> None:
        """Somebody asks a loader for the next batch."""
        if not self.has_model:
            self.before_model()
            return
        thread = _get_ident()
        if self._others(self.progress.training_thread or _MAIN, thread):
            self.loads_elsewhere = True
            return  # somebody fetches ahead: nobody waits for that
        if thread != self._holder and self._at_work(thread):
            return
        if self._session:
            self._close_what_raised()
        if self._inside and not self._session and not calls(sys._getframe(), _CALL_MODULE):
            self._close_forward()
        if self._inside:
            # A model that fetches its batches by itself.
            self._load(thread)
        elif not self._session:
            if not self.progress.in_step or self._unstepped or self.in_graph.stepped:
                self._begin_step()
            self._load(thread)

    def _load(self, thread: int) -> None:
        self._loading = thread
        self.loads += 1
        self.progress.enter(self._data)

    def _data_ended(self) -> None:
        """The batch is there."""
        if _get_ident() == self._loading:
            self.progress.leave(self._data)
            if not self.loads % _OFTEN:
                self.progress.flush_if_due()

    # -- compilation

    def compile_began(self, thread: int) -> None:
        """A graph is being compiled, in the middle of whatever needs it."""
        # Backward may compile in a thread of autograd's; other threads' compiling is not a step's.
        evaluates = self._inside and thread == self._holder
        if thread == self.progress.training_thread or self._session or evaluates:
            self.progress.enter(self._compile)

    def compile_ended(self) -> None:
        """It is compiled."""
        self.progress.leave(self._compile)

    # -- threads

    def _at_work(self, thread: int) -> bool:
        """Whether another thread is in a forward that trains, or in a backward."""
        if self._session:
            # Autograd has threads of its own.
            others = self._others(self.progress.training_thread, thread) and _outside_of_backward()
            return others and _backward_is_under_way()
        return bool(self._inside and self._training) and self._others(self._holder, thread)

    def _elsewhere(self, thread: int, training: bool) -> bool:
        """Whether a forward in this thread is no part of what is measured."""
        if self._session:
            # Also what a backward computes again in one of autograd's threads.
            return self._others(self.progress.training_thread, thread) and _backward_is_under_way()
        if self._inside:
            # Training comes first: an actor's or an evaluator's forward is left.
            if self._others(self._holder, thread) and (self._training or not training):
                return True
            self._close_forward()
            return False
        progress = self.progress
        beside = progress.in_step and not training
        return beside and self._others(progress.training_thread, thread)

    def in_forward_elsewhere(self) -> bool:
        """Whether another thread is inside a watched model: its parts may be called in this one."""
        return self._inside > 0 and self._others(self._holder, _get_ident())

    @staticmethod
    def _others(owner: int, thread: int) -> bool:
        """Whether this is the work of another thread, one that is still there."""
        if owner in (0, thread):
            return False
        return any(each.ident == owner for each in threading.enumerate())

    # -- the step

    def _close_forward(self) -> None:
        """What Ctrl-C or sys.exit leaves in the middle of forward: torch calls no hook then."""
        self._inside = 0
        self.progress.leave(self._forward)
        self.progress.leave(self._eval)
        self.on_interrupted()

    def _close_what_raised(self) -> None:
        """An exception in backward leaves its end untold; forward tells its end in any case."""
        if _outside_of_backward():
            self._close_session()

    def _close_session(self) -> None:
        self._session = False
        self._inside = 0
        self.progress.leave(self._backward)

    def _begin_step(self) -> None:
        # An optimizer that raised has left its end untold.
        if self._optimizing is not None:
            self._optimizing = None
            self._evaluating = False
            self.progress.leave(self._optimizer)
        # Work begins again after a backward, and no optimizer made a step of it: more of the same
        # step, unless the scaler has seen to it that none was made.
        if self.scaling is not None and self._left_out(self.scaling()):
            self._finish_step(skipped=True)
        if self.in_graph.stepped:
            self.in_graph.stepped = False
            self.steps_in_graph += 1
            self._finish_step()
        if not self.progress.in_step:
            if not self.progress.steps_began:
                self.on_first_step()
            self.progress.begin_step()

    def _left_out(self, now: Any) -> bool:
        """Whether the scaler has ended a round since it was last asked, and none of it was ours."""
        before, self._round = self._round, now
        return self._unstepped > 0 and before is not now and before is not self._stepped_round

    def _finish_step(self, skipped: bool = False, phase: Phase | None = None) -> None:
        if self._doubted is not None and self._doubted_backward:
            self._doubted.trains_in_eval = True
        self._unstepped = self._steps_of_others = 0
        self._fed = None
        self.steps += 1
        progress = self.progress
        if progress.step_finished(skipped, phase) or self._closely:
            self._aside("_tell")
            self._aside("after_step")
        following = progress.step_count + 1
        closely = self.every > 0 and following % self.every == 0
        counting = following == self.count_at
        if closely is not self._closely or counting is not self._counting:
            self._look_closely(closely, counting)

    # -- a step that is looked at closely

    def _look_closely(self, closely: bool, counting: bool) -> None:
        """Time our own hooks: those of one step stand for those of all until the next one."""
        if self._counting:
            self._aside("after_counting")
        if counting:
            self._aside("before_counting")
        self._closely, self._counting = closely, counting
        self._prepare()

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        progress, every = self.progress, self.every

        def timed(*args: Any) -> Any:
            began, aside_s = time.perf_counter(), self._aside_s
            try:
                return hook(*args)
            finally:
                took_s = time.perf_counter() - began - (self._aside_s - aside_s)
                progress.hook_s += took_s * every

        return timed

    def _counted(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._aside("counted", self._open[-1].name)
            return hook(*args)

        return counted

    def _aside(self, reading: str, *args: Any) -> None:
        """Do what is not done in every step, and time it as what it is.

        What fails time and again is done no more; the steps are measured as before.
        """
        began = time.perf_counter()
        try:
            getattr(self, reading)(*args)
        except containment.ANY_ERROR:
            containment.record_failure(reading)
            self._failed_aside[reading] = failures = self._failed_aside.get(reading, 0) + 1
            if failures >= _FAILURES_ALLOWED:
                setattr(self, reading, _nothing)
        took_s = time.perf_counter() - began
        self.progress.hook_s += took_s
        self._aside_s += took_s

    def _prepare(self) -> None:
        # Made once: a bound method is a new object each time it is asked for.
        for name, what in _HOOKS.items():
            hook = getattr(self, what)
            if self._closely:
                hook = self._timed(hook)
            if self._counting:
                hook = self._counted(hook)
            setattr(self, name, hook)
        self._ear.hears(self.on_gradient)
