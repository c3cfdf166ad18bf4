"""The usual step: one forward, one backward and one step of one optimizer, all in one thread.

Its hooks find memory that forward and backward have driven out of the caches, so they touch as
little as they can: each writes its word, and remembers the place where the step is. What the other
parts would have noted follows from that place. `leave` notes it before they do anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.compiler import is_compiling, is_dynamo_compiling

from otel_ddp import errors
from otel_ddp.recording.phases import PHASE_WORD
from otel_ddp.torch.steps.backwards import Backwards
from otel_ddp.torch.steps.open_calls import current_backward
from otel_ddp.torch.steps.open_step import OpenStep
from otel_ddp.torch.steps.sampled import OFTEN
from otel_ddp.torch.steps.watched_model import INNER_HOOK, in_functorch

queue_callback = Variable._execution_engine.queue_callback
# In this order: from _LOADED on a forward may begin. It is _READY between two steps, and after a
# backward.
_NOWHERE, _LOADING, _FORWARD, _FORWARDED, _BACKWARD, _WAIT, _OPTIMIZER, _LOADED, _READY = range(9)


class Unusual:
    """What the hooks do in all other steps; those on models and on optimizers say it."""

    before_forward: Callable[[nn.Module, tuple[Any, ...], Any], None]
    after_forward: Callable[[nn.Module, Any], None]
    before_step: Callable[[torch.optim.Optimizer, tuple[Any, ...], Any], None]
    after_step: Callable[[torch.optim.Optimizer], None]
    mark_outputs: Callable[[Any], None]
    """Put the hook of backward on all tensors of an output."""
    failed: Callable[[str], None] = staticmethod(errors.record_failure)
    """What a hook of forward or of the optimizer that has raised is handed to."""


unusual = Unusual()


class UsualSteps(NamedTuple):
    """The hooks, as torch calls them, and what the other parts tell."""

    before_forward: Callable[..., None]
    after_forward: Callable[..., None]
    gradient_arrived: Callable[[torch.Tensor], None]
    before_step: Callable[..., None]
    after_step: Callable[..., None]
    load_began: Callable[[int], bool]
    """True: that is all."""
    load_ended: Callable[[int], bool]
    learn: Callable[[], None]
    """A step has ended the long way: those after it may be usual."""
    leave: Callable[[], None]
    """Note where the step is, before anything else looks; the rest of it goes the long way."""
    measure: Callable[[OpenStep, Backwards], None]
    """From here on, these steps."""


def _made() -> UsualSteps:
    """Closures: what they share lies side by side, and local names are found soonest.

    One function a hook: each further one that only we call costs a microsecond. They are made once,
    as models may carry them along.
    """
    # Of what is measured.
    none: Any = None
    step = backwards = progress = sampled = calls = phases = steps = work = none
    opened = clock = write = end_step = put_on = queue = none
    other = load = forward = backward = wait = optimize = 0
    get_ident, is_grad_enabled = threading.get_ident, torch.is_grad_enabled
    tensor, in_transform = torch.Tensor, in_functorch
    # What torch itself asks in each call of a module.
    trace = torch._C._get_tracing_state

    place = _NOWHERE
    thread = backward_id = backwards_made = 0
    watched = inner_hooks = inner_hook = none
    model: Callable[[], Any] = _nothing
    trained_by: Callable[[], Any] = _nothing
    # What the last batch looked like, and its work.
    shape = dtype = none
    samples = tokens = 0
    flops = 0.0

    def measure(of: OpenStep, its_backwards: Backwards) -> None:
        nonlocal step, backwards, progress, sampled, calls, phases, steps, work
        nonlocal opened, clock, write, end_step, put_on, queue, place
        nonlocal other, load, forward, backward, wait, optimize
        place = _NOWHERE
        step, backwards = of, its_backwards
        progress, sampled, calls = step.progress, step.sampled, step.calls
        phases, steps, work = progress.phases, progress.steps, progress.work
        opened, clock, write = phases.opened, phases.clock, phases.pending.append
        end_step, put_on, queue = progress.end_step, backwards.hook.put_on, queue_callback
        other, load, forward = opened[0].base, calls.load.base, calls.forward.base
        backward, wait, optimize = calls.backward.base, calls.wait.base, step.optimizer.base

    def learn() -> None:
        nonlocal place, thread, backwards_made, watched, model, trained_by
        nonlocal inner_hooks, inner_hook
        nonlocal shape, dtype, samples, tokens, flops
        optimizer, last = step.end.only_optimizer(), calls.model
        if (
            optimizer is None
            or last is None
            or last.flops_per_unit is None
            or last.syncs_buffers
            or not last.counted
            or sampled.sampling
            or sampled.counting
            or step.search.on
            or len(opened) > 1
        ):
            return
        watched, model, inner_hooks, inner_hook = last, last.model, last.inner_hooks, None
        trained_by, thread, backwards_made = optimizer, progress.thread.ident, 0
        shape, dtype = last.batch or (None, None)
        samples, tokens, flops = last.samples, last.tokens, last.flops
        calls.forward_thread = thread
        place = _READY

    def leave() -> None:
        nonlocal place
        was, place = place, _NOWHERE
        if was == _NOWHERE:
            return
        calls.forwards = int(was == _FORWARD)
        calls.trains = True
        calls.in_backward = was in (_BACKWARD, _WAIT)
        calls.backward_id = backward_id
        step.end.backwards = backwards_made
        if was == _OPTIMIZER:
            step.optimizing = id(trained_by())
        if steps.model_called:
            step.batches.model = watched
            step.batches.awaits = _FORWARD <= was <= _WAIT
        if was == _LOADING:
            opened.append(calls.load)
        elif was == _FORWARD:
            opened.append(calls.forward)
        elif was == _OPTIMIZER:
            opened.append(step.optimizer)
        elif calls.in_backward:
            opened.append(calls.backward)
            if was == _WAIT:
                opened.append(calls.wait)

    # Each of these writes its word itself: a function that they share costs a microsecond a time.

    def load_began(asking: int) -> bool:
        nonlocal place
        if place != _READY or asking != thread:
            return False
        step.seen.loads += 1
        if not steps.in_step:
            steps.begin_step()
        place = _LOADING
        phases.words[PHASE_WORD] = word = load + clock()
        write(word)
        if phases.device_clock is not None:
            phases.device_clock.mark(word)
        return True

    def load_ended(asking: int) -> bool:
        nonlocal place
        if place != _LOADING or asking != thread:
            return False
        place = _LOADED
        phases.words[PHASE_WORD] = word = other + clock()
        write(word)
        if phases.device_clock is not None:
            phases.device_clock.mark(word)
        return True

    # Torch's tools may copy hooks to modules of their own, and forget with which arguments they are
    # called: so each argument has a default, and more of them are no error.

    def before_forward(module: nn.Module, args: Any = (), kwargs: Any = None, *_: Any) -> None:
        nonlocal place, inner_hook
        # Traced into a graph this would break it; the compiled model then calls no hook. In
        # torch.jit.trace our variables would give their names to tensors of the graph.
        if is_dynamo_compiling() or trace() is not None:
            return
        try:
            if (
                place < _LOADED
                or model() is not module
                or not module.training
                or get_ident() != thread
                or not is_grad_enabled()
            ):
                unusual.before_forward(module, args, kwargs)
                return
            only: Any = args[0] if len(args) == 1 and not kwargs else None
            if (
                type(only) is tensor
                and only.shape == shape
                and only.dtype is dtype
                and not in_transform()
            ):
                work.samples += samples
                if tokens:
                    work.tokens += tokens
                if flops:
                    work.flops += flops
            elif is_compiling():
                unusual.before_forward(module, args, kwargs)
                return
            else:
                watched.take(args, kwargs, work)
                work.samples += watched.samples
                work.tokens += watched.tokens
            if inner_hooks is not None and (inner := inner_hooks()) is not None:
                inner_hook = inner.pop(INNER_HOOK, None)
            if not steps.in_step:
                steps.begin_step()
            steps.model_called = True
            place = _FORWARD
            phases.words[PHASE_WORD] = word = forward + clock()
            write(word)
            if phases.device_clock is not None:
                phases.device_clock.mark(word)
        except errors.ANY_ERROR:
            unusual.failed("before forward")

    def after_forward(module: nn.Module, args: Any = (), output: Any = None, *_: Any) -> None:
        nonlocal place
        if is_dynamo_compiling():
            return
        try:
            if place != _FORWARD or model() is not module or get_ident() != thread:
                unusual.after_forward(module, output)
                return
            if inner_hook is not None and (inner := inner_hooks()) is not None:
                inner[INNER_HOOK] = inner_hook
            steps.forwards += 1
            place = _FORWARDED
            phases.words[PHASE_WORD] = word = other + clock()
            write(word)
            if phases.device_clock is not None:
                phases.device_clock.mark(word)
            if sampled.wants_loss:
                sampled.notify("forward_ended", watched, module, output)
            if type(output) is tensor:
                put_on(output, output.grad_fn)
            else:
                unusual.mark_outputs(output)
        except errors.ANY_ERROR:
            unusual.failed("after forward")

    def gradient_arrived(gradient: torch.Tensor) -> None:
        nonlocal place, backward_id
        try:
            if place == _FORWARDED:
                backward_id = current_backward()
                place = _BACKWARD
                phases.words[PHASE_WORD] = word = backward + clock()
                write(word)
                if phases.device_clock is not None:
                    phases.device_clock.mark(word)
                queue(gradients_done)
                if sampled.wants_backward:
                    sampled.notify("backward_began")
            elif place != _BACKWARD or current_backward() != backward_id:
                leave()
                backwards.gradient_arrived(gradient)
        except errors.ANY_ERROR:
            backwards.failed("backward began")

    def gradients_done() -> None:
        nonlocal place
        try:
            if place == _BACKWARD:
                place = _WAIT
                phases.words[PHASE_WORD] = word = wait + clock()
                write(word)
                if phases.device_clock is not None:
                    phases.device_clock.mark(word)
                queue(backward_ended)
            else:
                leave()
                backwards.gradients_done()
        except errors.ANY_ERROR:
            backwards.failed("gradients done")

    def backward_ended() -> None:
        nonlocal place, backwards_made
        try:
            # Very many backwards without a step are flushed.
            if place == _WAIT and backwards_made < OFTEN - 1:
                backwards_made += 1
                steps.micro_batches += 1
                place = _READY
                phases.words[PHASE_WORD] = word = other + clock()
                write(word)
                if phases.device_clock is not None:
                    phases.device_clock.mark(word)
            else:
                leave()
                backwards.ended()
        except errors.ANY_ERROR:
            backwards.failed("backward ended")

    def before_step(
        optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None, *_: Any
    ) -> None:
        nonlocal place
        if is_dynamo_compiling() and _may_be_one_graph(optimizer):
            return
        try:
            # Before a backward it may be a checkpoint that fills its state. A scaler has left there
            # whether the step is to be skipped. Beside its optimizer, `step` is given a closure.
            if (
                place < _LOADED
                or not backwards_made
                or trained_by() is not optimizer
                or getattr(optimizer, "found_inf", None) is not None
                or len(args) > 1
                or kwargs
            ):
                unusual.before_step(optimizer, args, kwargs)
                return
            place = _OPTIMIZER
            phases.words[PHASE_WORD] = word = optimize + clock()
            write(word)
            if phases.device_clock is not None:
                phases.device_clock.mark(word)
        except errors.ANY_ERROR:
            unusual.failed("before the optimizer")

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal place, backwards_made
        if is_dynamo_compiling() and _may_be_one_graph(optimizer):
            return
        try:
            if place != _OPTIMIZER or trained_by() is not optimizer:
                unusual.after_step(optimizer)
                return
            now = clock()
            if now >= progress.flush_due_ns or steps.count + 2 >= sampled.next_change:
                unusual.after_step(optimizer)
                return
            backwards_made = 0
            place = _READY
            word = other + now
            write(word)
            end_step(now, word, False)
        except errors.ANY_ERROR:
            unusual.failed("after the optimizer")

    return UsualSteps(
        *(before_forward, after_forward, gradient_arrived, before_step, after_step),
        *(load_began, load_ended, learn, leave, measure),
    )


def _may_be_one_graph(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step may be compiled into one graph, which a hook of ours would break.

    That is an error if the user wants one graph. Torch's own optimizers break it by themselves.
    """
    return not type(optimizer).__module__.startswith("torch.")


def _nothing() -> None:
    pass


usual_steps = _made()
# Where a class copies its models itself, the copies have our hooks. Pickle finds these by name.
before_forward, after_forward = usual_steps.before_forward, usual_steps.after_forward
before_forward.__qualname__, after_forward.__qualname__ = "before_forward", "after_forward"
