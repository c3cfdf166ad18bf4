"""The hooks on a model: module-level functions that know their models and ignore copies of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from otel_ddp import containment
from otel_ddp.torch import inspect_values, saving
from otel_ddp.torch.hooks import every_module
from otel_ddp.torch.stepper import BackwardHook, Stepper

_MOST_OUTPUTS, _MOST_OF_ONE = 64, 48
# What a tensor's own register_hook calls.
_REGISTER = "_register_hook_dict"
_Tensor = torch.Tensor
_is_tracing = torch._C._is_tracing
# What calls a module, and the class of what torch.compile gives for one.
_CALL_MODULE = nn.Module._wrapped_call_impl.__code__
_COMPILED = "OptimizedModule"
# Under which a hook lies that is taken off and put on again in each forward of DDP.
_OURS = "otel_ddp"


class _Watched:
    """A model that is watched; found by its id, for a weak dictionary is four times as slow."""

    __slots__ = (
        *("alone", "aside", "by_samples", "divided_loss", "flops_per_unit", "forwards", "found"),
        *("is_ddp", "model", "samples", "stepper", "syncs_buffers", "tokens", "trains_in_eval"),
    )

    def __init__(self, model: nn.Module, stepper: Stepper, among: dict[int, _Watched]) -> None:
        # Never the model itself: most of a device's memory hangs on it. And no function of Python's
        # is told of its end: what a signal handler raises in one is lost.
        self.model = ref(model, partial(among.pop, id(model)))
        self.stepper = stepper
        # Whether it was found, not named.
        self.found = False
        # Of a module inside of DDP: whether it is being called past DDP.
        self.alone = False
        # The hooks of the module inside of DDP, where ours is only for calls past DDP.
        self.aside: dict[Any, Any] | None = None
        # Whether it may give every rank the same buffers before a forward.
        self.syncs_buffers = False
        # DDP does as the model inside of it does, and whoever sets only that one's mode leaves its
        # own as it was.
        self.is_ddp = isinstance(model, DistributedDataParallel)
        # Whether it was told what to divide its loss by: by the items of all ranks and batches.
        self.divided_loss = False
        # Whether it trains in evaluation mode, as one does that keeps its statistics.
        self.trains_in_eval = False
        # Of forward and backward, for a token, or for a sample where there are none: None as long
        # as that is not known, 0 where it never will be.
        self.flops_per_unit: float | None = None
        self.by_samples = False
        self.forwards = self.samples = self.tokens = 0


# A replica (of DataParallel, say) carries the hooks along, but is not in here.
_watched: dict[int, _Watched] = {}
# The module inside of DDP: DDP may wait before it, and who validates may call it by itself.
_inner: dict[int, _Watched] = {}


def attach(module: nn.Module, stepper: Stepper, found: bool = False) -> bool:
    """Watch a model, the outermost object that the training loop calls; False if it is already."""
    if id(module) in _watched:
        return False
    watched = _watched[id(module)] = _Watched(module, stepper, _watched)
    watched.found = found
    # A copy has inherited those of the model that it was made of.
    take_off(module, call_began, _after_forward)
    module.register_forward_pre_hook(call_began, prepend=True, with_kwargs=True)
    # Also where forward raises: the time after that is not forward.
    module.register_forward_hook(_after_forward, prepend=True, always_call=True)
    saving.keep_out(module, _ALL)
    # A scripted one takes no hooks.
    inside = module.module if isinstance(module, DistributedDataParallel) else None
    if inside is not None and not isinstance(inside, torch.jit.ScriptModule):
        _attach_inside(module, inside, watched)
    if id(module) not in _watched:
        # A signal handler has taken off all there was, in the middle of this.
        take_off(module, call_began, _after_forward)
        if inside is not None:
            take_off(inside, _before_inner, _after_inner)
        return False
    return True


def _attach_inside(ddp: Any, inside: nn.Module, watched: _Watched) -> None:
    watched.syncs_buffers = bool(ddp.broadcast_buffers) and any(True for _ in inside.buffers())
    # Not held by that DDP: one module may be wrapped time and again.
    known = _inner.get(id(inside))
    within = _inner[id(inside)] = _Watched(inside, watched.stepper, _inner)
    within.syncs_buffers = watched.syncs_buffers or (known is not None and known.syncs_buffers)
    take_off(inside, _before_inner, _after_inner)
    inside._forward_pre_hooks[_OURS] = _before_inner
    saving.keep_out(inside, _ALL)
    if not within.syncs_buffers:
        # A hook that has nothing to do costs microseconds in each forward, taking it off costs a
        # tenth of that.
        watched.aside = inside._forward_pre_hooks


def take_off(module: nn.Module, *ours: Any) -> None:
    """Take these hooks off a module."""
    # By what they are, not by a handle: a copy carries them along and has none, and a shallow one
    # shares them.
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(module, kind)
        for key, hook in list(hooks.items()):
            if any(hook is each for each in ours):
                hooks.pop(key, None)
                for more in ("_with_kwargs", "_always_called"):
                    getattr(module, kind + more, {}).pop(key, None)


def detach() -> None:
    """Take all hooks off again."""
    for watched in [*_watched.values(), *_inner.values()]:
        model: Any = watched.model()
        if model is None:
            continue
        take_off(model, *_ALL)
        saving.let_in(model)
        if isinstance(model._compiled_call_impl, _CompiledInPlace):
            model._compiled_call_impl = model._compiled_call_impl.call
    _watched.clear()
    _inner.clear()


def watched() -> list[nn.Module]:
    """The models that are watched and still alive."""
    models = (each.model() for each in list(_watched.values()))
    return [model for model in models if model is not None]


def follow(watched: _Watched) -> None:
    """Watch the DDP that is just calling a model, if one is: that model was wrapped later on."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and attach(ddp, watched.stepper):
        around = _watched[id(ddp)]
        # The same work, of which one forward has been seen or more.
        around.forwards, around.flops_per_unit = watched.forwards, watched.flops_per_unit
        around.by_samples = watched.by_samples


def follow_compiled(stepper: Stepper) -> None:
    """Watch what torch.compile has put around a watched model, which is being compiled just now.

    No hook inside of it is called any more. Whoever listens is told of it only where a step has
    begun before the model is called: by a loader.
    """
    around: Any = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL_MODULE:
            module = frame.f_locals.get("self")
            if type(module).__name__ == _COMPILED and _wraps_a_watched(module):
                around = module
        frame = frame.f_back
    if around is not None:
        attach(around, stepper)


def _wraps_a_watched(compiled: Any) -> bool:
    inner = compiled._orig_mod
    while inner is not None and id(inner) not in _watched:
        inner = inner.module if isinstance(inner, DistributedDataParallel) else None
    return inner is not None


def watch_compiled() -> None:
    """Measure models that `module.compile()` has compiled in place, from outside of the graph."""
    for model in watched():
        call = getattr(model, "_compiled_call_impl", None)
        if call is not None and not isinstance(call, _CompiledInPlace):
            # Left out by torch itself where a module is copied or pickled.
            model._compiled_call_impl = _CompiledInPlace(model, call)


class _CompiledInPlace:
    """Stands before a module's compiled call, whose hooks are compiled away."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        self.call = call
        self._module = ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            return self.call(*args, **kwargs)
        # Compiled code is valid for the hooks that there were when it was compiled.
        looking = every_module.take_off()
        call_began(module, args, kwargs)
        try:
            output = self.call(*args, **kwargs)
        except BaseException:
            _after_forward(module, args, None)
            raise
        finally:
            if looking:
                every_module.put_on()
        _after_forward(module, args, output)
        return output


# Torch's tools may copy these to modules of their own, and forget how they want to be called: what
# is not said has a default, and what is said beside it is no error.


def call_began(module: nn.Module, args: Any = (), kwargs: Any = None, *_: Any) -> None:
    """The hook before the forward of a watched model."""
    # Traced into a graph this would break it; the compiled model then calls no hook. Beside
    # torch.jit.trace our variables would give their names to tensors of the graph.
    if is_compiling() or _is_tracing():
        return
    watched = _watched.get(id(module))
    if watched is None or not watched.stepper.alive:
        return
    if watched.aside is not None:
        watched.aside.pop(_OURS, None)
    try:
        watched.stepper.forward_began(watched, module, args, kwargs)
    except containment.ANY_ERROR:
        watched.stepper.failed("before forward")


def _before_inner(module: nn.Module, *_: Any) -> None:
    if is_compiling() or _is_tracing():
        return
    watched = _inner.get(id(module))
    if watched is None or not watched.stepper.alive:
        return
    try:
        if watched.stepper.evaluated_by_itself(watched, module):
            watched.alone = True
            take_off(module, _after_inner)
            module.register_forward_hook(_after_inner, always_call=True)
        elif watched.syncs_buffers:
            watched.stepper.buffers_arrived()
    except containment.ANY_ERROR:
        watched.stepper.failed("before the inner forward")


def _after_inner(module: nn.Module, args: Any = (), output: Any = None, *_: Any) -> None:
    if is_compiling():
        return
    if output is not None:
        # Where forward has raised torch is still going over these hooks.
        take_off(module, _after_inner)
    watched = _inner.get(id(module))
    if watched is None or not watched.alone or not watched.stepper.alive:
        return
    watched.alone = False
    try:
        watched.stepper.forward_ended(watched, module, None)
    except containment.ANY_ERROR:
        watched.stepper.failed("after the inner forward")


def _after_forward(module: nn.Module, args: Any = (), output: Any = None, *more: Any) -> None:
    if is_compiling() or _is_tracing():
        return
    watched = _watched.get(id(module))
    if watched is None or not watched.stepper.alive:
        return
    if watched.aside is not None:
        watched.aside[_OURS] = _before_inner
    if more:
        output = more[-1]
    stepper = watched.stepper
    try:
        ear = stepper.forward_ended(watched, module, output)
        if ear is None:
            return
        # Not a full backward hook: that one wraps the outputs, and in-place changes of them then
        # raise in the user's code.
        if type(output) is _Tensor:
            _listen(output, output.grad_fn, ear)
        else:
            for tensor in differentiable(output):
                _listen(tensor, inspect_values.of_tensor(tensor, "grad_fn"), ear)
    except containment.ANY_ERROR:
        stepper.failed("after forward")


def _listen(tensor: torch.Tensor, node: Any, ear: BackwardHook) -> None:
    """`tensor.register_hook(ear.hook)` at a third of its price, leaving it as it is."""
    if node is None:
        return  # a parameter, which lives on: a hook each time would be one more each time
    # It may be the same one each time: one that is kept beside the model.
    if (marks := getattr(node, "metadata", None)) is not None:
        if ear in marks:
            return
        marks[ear] = True
    if (register := getattr(node, _REGISTER, None)) is not None:
        register(ear.tensor)
    else:
        tensor.register_hook(ear.hook)


def differentiable(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output that backward may start from, whatever they are wrapped in."""
    left = [output]
    # It grows meanwhile: what is on top, where a loss mostly is, comes before what is further down.
    for value in islice(left, _MOST_OUTPUTS):
        kind = type(value)
        if issubclass(kind, _Tensor):
            # One of torch's own is asked at once: a call less for each.
            if (
                value.requires_grad
                if kind is _Tensor
                else inspect_values.of_tensor(value, "requires_grad")
            ):
                yield value
        elif issubclass(kind, dict):
            left.extend(islice(dict.values(value), _MOST_OF_ONE))
        elif issubclass(kind, list):
            left.extend(islice(list.__iter__(value), _MOST_OF_ONE))
        elif issubclass(kind, tuple):
            left.extend(islice(tuple.__iter__(value), _MOST_OF_ONE))
        elif value is output or inspect_values.maps(kind):
            # A class of the user's: one level of its attributes.
            left.extend(islice(inspect_values.attributes(value).values(), _MOST_OF_ONE))


_ALL = frozenset((call_began, _after_forward, _before_inner, _after_inner))
