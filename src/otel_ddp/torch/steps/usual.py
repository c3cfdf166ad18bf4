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
from torch.compiler import is_compiling

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


class UsualSteps(NamedTuple):
    """What hooks tell first. True: that is all. False: nothing was done, tell the part."""

    forward_began: Callable[[nn.Module, tuple[Any, ...], Any], bool]
    forward_ended: Callable[[nn.Module, Any], bool]
    gradient_arrived: Callable[[torch.Tensor], None]
    """A hook of torch's: it tells the part itself, and sees to the end of backward."""
    optimizer_began: Callable[[torch.optim.Optimizer], bool]
    """To be told only of a step without a closure."""
    optimizer_ended: Callable[[torch.optim.Optimizer], bool]
    load_began: Callable[[int], bool]
    load_ended: Callable[[int], bool]
    learn: Callable[[], None]
    """A step has ended the long way: those after it may be usual."""
    leave: Callable[[], None]
    """Note where the step is, before anything else looks; the rest of it goes the long way."""


def usual_steps(step: OpenStep, backwards: Backwards) -> UsualSteps:
    """Closures: what they share lies side by side, and local names are found soonest."""
    progress, sampled, calls = step.progress, step.sampled, step.calls
    phases, steps, work = progress.phases, progress.steps, progress.work
    opened, clock, write = phases.opened, phases.clock, phases.pending.append
    end_step = progress.end_step
    get_ident, is_grad_enabled = threading.get_ident, torch.is_grad_enabled
    queue = queue_callback
    other, load, forward = opened[0].base, calls.load.base, calls.forward.base
    backward, wait, optimize = calls.backward.base, calls.wait.base, step.optimizer.base

    place = _NOWHERE
    thread = backward_id = backwards_made = 0
    watched: Any = None
    model: Callable[[], Any] = _nothing
    trained_by: Callable[[], Any] = _nothing
    inner_hooks: Any = None
    inner_hook: Any = None
    # What the last batch looked like, and its work.
    shape: Any = None
    dtype: Any = None
    samples = tokens = 0
    flops = 0.0
    tensor, in_transform, is_tracing = torch.Tensor, in_functorch, torch._C._is_tracing

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
        if watched.found and steps.model_called:
            step.batch_model = watched
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

    def forward_began(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> bool:
        nonlocal place, inner_hook, shape
        if (
            place < _LOADED
            or model() is not module
            or not module.training
            or get_ident() != thread
            or not is_grad_enabled()
            or is_tracing()
        ):
            return False
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
            return False
        else:
            watched.take(args, kwargs, work)
            if watched.divided_loss:
                shape = None  # each call is asked for its divisor
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
        return True

    def forward_ended(module: nn.Module, output: Any) -> bool:
        nonlocal place
        if place != _FORWARD or model() is not module or get_ident() != thread:
            return False
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
        return True

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

    def optimizer_began(optimizer: torch.optim.Optimizer) -> bool:
        nonlocal place
        # Before a backward it may be a checkpoint that fills its state. A scaler has left there
        # whether the step is to be skipped.
        if (
            place < _LOADED
            or not backwards_made
            or trained_by() is not optimizer
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return False
        place = _OPTIMIZER
        phases.words[PHASE_WORD] = word = optimize + clock()
        write(word)
        if phases.device_clock is not None:
            phases.device_clock.mark(word)
        return True

    def optimizer_ended(optimizer: torch.optim.Optimizer) -> bool:
        nonlocal place, backwards_made
        if place != _OPTIMIZER or trained_by() is not optimizer:
            return False
        now = clock()
        if now >= progress.flush_due_ns or steps.count + 2 >= sampled.next_change:
            return False
        backwards_made = 0
        place = _READY
        word = other + now
        write(word)
        end_step(now, word, False)
        return True

    return UsualSteps(
        *(forward_began, forward_ended, gradient_arrived, optimizer_began, optimizer_ended),
        *(load_began, load_ended, learn, leave),
    )


def _nothing() -> None:
    pass
