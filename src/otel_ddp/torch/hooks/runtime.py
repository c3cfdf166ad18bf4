"""Hooks on the runtime: compilation by Dynamo, replays of CUDA graphs, garbage collection."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import getitem, setitem, sub
from typing import Any
from weakref import WeakKeyDictionary

import torch

from otel_ddp import errors
from otel_ddp.recording.steps import Work
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None


def attach(stepper: Stepper) -> None:
    """Put the hooks on; Dynamo's only if it is imported already, as importing it takes a second."""
    global _stepper
    if _stepper is not stepper:
        detach()
        _stepper = stepper
        attach_to_gc(stepper)
        _attach_to_graphs()
    listen(compiling, _compiled)


def detach() -> None:
    """Take all hooks off."""
    global _stepper
    _stepper = None
    ignore(compiling, _compiled)
    detach_from_gc()
    # Keep `_steps`: once hooks are attached again, they count replays of these graphs again.
    while _handles:
        _handles.pop().remove()


def _act(where: str, method: Callable[..., None], *given: Any) -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive:
        stepper.act(where, method, stepper, *given)


# -- compilation


def listen(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call *before* and *after* around each compilation."""
    found = _callbacks()
    if found is not None and before not in found.start_callbacks:
        found.start_callbacks.append(before)
        found.end_callbacks.append(after)


def ignore(*listeners: Callable[..., None]) -> None:
    """Stop calling these functions at compilations."""
    found = _callbacks()
    if found is not None:
        # New lists: Dynamo may be iterating over the old ones.
        found.start_callbacks = [each for each in found.start_callbacks if each not in listeners]
        found.end_callbacks = [each for each in found.end_callbacks if each not in listeners]


def _callbacks() -> Any:
    """Dynamo's lists of callbacks; None if it is not imported."""
    # A private object. A torch without it counts compilations to the phase in which they happen.
    found: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return found if all(hasattr(found, name) for name in ("start_callbacks", "clear")) else None


def compiling(*_: Any) -> None:
    """A compilation begins, or these hooks were attached in the middle of one."""
    _act("before compiling", _begin)


def _begin(stepper: Stepper) -> None:
    if stepper.searching:
        stepper.search.compiling()
    stepper.compile_began(threading.get_ident())
    model_hooks.compiling(stepper)
    # If the compiled code is an optimizer's step, it has guards on these hooks: keep them on.
    optimizer_hooks.switch(True)


def _compiled(*_: Any) -> None:
    _act("after compiling", Stepper.compile_ended)


# -- CUDA graphs that contain optimizer steps

_handles: list[Any] = []
# CUDA graph -> training steps in each replay; only graphs that contain a training step.
_steps = WeakKeyDictionary[Any, int]()


def _attach_to_graphs() -> None:
    # PyTorch before 2.15 has no such hooks: replayed steps are not counted there.
    for name, hook in (
        ("capture_start", lambda graph: _act("before a capture", Stepper.capture_began)),
        ("capture_end", _capture_ended),
        ("replay_start", _replay_began),
        ("replay_end", _replay_ended),
    ):
        register = getattr(torch.cuda.graphs, f"register_graph_{name}_hook", None)
        if register is not None:
            _handles.append(register(hook))


def _capture_ended(graph: Any) -> None:
    stepper = _stepper
    # Do not use `_act`: the stepper's `act` ignores all hooks during a capture, even its end.
    if stepper is not None and stepper.alive and (steps := stepper.capture_ended()):
        _steps[graph] = steps


def _replay_began(graph: Any) -> None:
    if _steps and graph in _steps:
        _act("before a replay", Stepper.replay_began)


def _replay_ended(graph: Any) -> None:
    if _steps and (steps := _steps.get(graph)):
        _act("after a replay", Stepper.replay_ended, steps)


# -- pauses of the garbage collector

_gc_callback: Any = None


def attach_to_gc(stepper: Stepper, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """Time every collection, without running Python code during it."""
    global _gc_callback
    detach_from_gc()
    made = _gc_callback = _timer(stepper.progress.work, clock)
    gc.callbacks.append(made)


def detach_from_gc() -> None:
    """Stop timing collections."""
    global _gc_callback
    try:
        gc.callbacks.remove(_gc_callback)
    except ValueError:  # not there
        errors.reraise_foreign()
    _gc_callback = None


def _timer(work: Work, clock: Callable[[], int]) -> Any:
    """A callback for the garbage collector, which calls it with a phase and a dictionary.

    It must not be a Python function: a signal that arrived during the collection would be handled
    on entry, and the collector swallows exceptions of the handler, including Ctrl-C. So the
    callback is `getattr(phases, "start" or "stop", dictionary)`: the attribute is a property that
    advances an iterator in C, which reads the clock.
    """
    # If a collection is running now, its start was missed: time it from now on.
    began = [clock()]
    starts = map(partial(setitem, began, 0), iter(clock, None))
    lasted = map(sub, iter(clock, None), iter(partial(getitem, began, 0), None))
    totals = accumulate(lasted, initial=work.gc_ns)
    next(totals)  # the initial value
    stops = map(partial(setattr, work, "gc_ns"), totals)
    phases = {"start": property(partial(next, starts)), "stop": property(partial(next, stops))}
    return partial(getattr, type("_Phases", (), phases)())
