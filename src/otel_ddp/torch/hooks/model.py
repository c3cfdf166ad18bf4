"""Puts the hooks on models.

They are made once a process, know their models, and ignore copies of these.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from otel_ddp.torch import inspection, models
from otel_ddp.torch.hooks import every_module
from otel_ddp.torch.steps.open_calls import outside_of_backward
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.watched_model import WatchedModel

_MOST_OUTPUTS, _MOST_OF_ONE = 64, 48
_Tensor = torch.Tensor
_is_tracing = torch._C._is_tracing
# What torch itself asks in each call of a module.
_trace = torch._C._get_tracing_state

# The key of our hooks on a model.
_HOOK = "otel_ddp model"
# Pickle and copy look this up on the object itself, before its class.
_STATE = "__getstate__"
# Where a module keeps its hooks, and what else it keeps of each of them, under the same keys.
_KINDS, _MORE = ("_forward_pre_hooks", "_forward_hooks"), ("_with_kwargs", "_always_called")

_stepper: Stepper | None = None
# By id. A replica (of DataParallel, say) carries the hooks along, but is not in here.
_watched: dict[int, WatchedModel] = {}
# The modules of which a call is a whole step. They have no hooks, and readings look at them.
_around: dict[int, Callable[[], nn.Module | None]] = {}


def attach(module: nn.Module, stepper: Stepper) -> bool:
    """Watch a model, the outermost object that the training loop calls; False if it is already."""
    global _stepper
    _stepper = stepper
    if id(module) in _watched:
        return False
    watched = _watch(module)
    # A scripted module takes no hooks.
    inside = module.module if isinstance(module, DistributedDataParallel) else None
    if inside is not None and not isinstance(inside, torch.jit.ScriptModule):
        watched.syncs_buffers = bool(module.broadcast_buffers) and any(
            True for _ in inside.buffers()
        )
        # DDP may wait before this one, and a validation may call it directly.
        if id(inside) not in _watched:
            _watch(inside)
    if id(module) not in _watched:
        # In the middle of this a signal handler has taken all hooks off.
        take_off(module, *_ALL)
        detach()
        return False
    return True


def _watch(module: nn.Module) -> WatchedModel:
    watched = _watched[id(module)] = WatchedModel(module, _watched)
    # A copy has inherited the hooks of the model that it was made of.
    take_off(module, *_ALL)
    _put_on(module)
    _keep_out(module)
    return watched


def _put_on(module: Any) -> None:
    """Put our hooks on, before those of others. As torch does it, with a key of our own."""
    for kind, more, hook in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, before_forward),
        # Called where forward raises, too: the time after that is not forward.
        (module._forward_hooks, module._forward_hooks_always_called, after_forward),
    ):
        kind[_HOOK] = hook
        kind.move_to_end(_HOOK, last=False)
        more[_HOOK] = True


def switch(on: bool) -> None:
    """Put the hooks on watched models, or take them off, between two steps.

    Of those alone that are called outside of compiled code, which is valid for its hooks.
    """
    for watched in list(_watched.values()):
        model: Any = watched.model()
        if model is None or not watched.called or watched.in_graph:
            continue
        if model._compiled_call_impl is not None:
            continue
        if on:
            _put_on(model)
        else:
            for hooks in (
                *(model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
                *(model._forward_hooks, model._forward_hooks_always_called),
            ):
                hooks.pop(_HOOK, None)


def compiling(stepper: Stepper) -> None:
    """A graph is about to be compiled, and a model that is not being called may be a part of it.

    It is valid for the hooks that the model then has, and the program may call the model itself
    too, as for an evaluation. So from now on they stay.
    """
    if stepper.progress.another_trains() or not outside_of_backward():
        return
    calls = {id(each.get("self")) for each in inspection.module_calls(sys._getframe())}
    for key, watched in list(_watched.items()):
        # What `torch.compile` returns is outside of its graph.
        if key in calls or watched.in_graph or hasattr(watched.model(), "_orig_mod"):
            continue
        stepper.go_on_measured()
        watched.in_graph = True


def take_off(module: nn.Module, *ours: Any) -> None:
    """Take these hooks off a module."""
    # By identity, not by a handle: a copy carries the hooks along and has no handle, and a shallow
    # copy shares them.
    for kind in _KINDS:
        hooks = getattr(module, kind)
        for key, hook in list(hooks.items()):
            if any(hook is each for each in ours):
                hooks.pop(key, None)
                for more in _MORE:
                    getattr(module, kind + more, {}).pop(key, None)


def detach() -> None:
    """Take all hooks off again."""
    global _stepper
    _stepper = None
    for watched in list(_watched.values()):
        model: Any = watched.model()
        if model is None:
            continue
        take_off(model, *_ALL)
        model.__dict__.pop(_STATE, None)
        if isinstance(model._compiled_call_impl, _CompiledInPlace):
            model._compiled_call_impl = model._compiled_call_impl.call
    _watched.clear()
    _around.clear()


def add_around(module: nn.Module) -> bool:
    """Watched models are called inside of this one, in each step; False if that is known."""
    if id(module) in _around:
        return False
    _around[id(module)] = ref(module, partial(_around.pop, id(module)))
    return True


def trained() -> list[nn.Module]:
    """The models that are trained: those that are watched, and those around them."""
    around = (each() for each in list(_around.values()))
    return [*watched(), *(model for model in around if model is not None)]


def is_watched(module: nn.Module) -> bool:
    """Whether this model is watched."""
    return id(module) in _watched


def is_in_watched(module: nn.Module) -> bool:
    """Whether this model is watched, or is what a watched one wraps."""
    return is_watched(module) or any(each.inside() is module for each in list(_watched.values()))


def watched() -> list[nn.Module]:
    """The models that are watched and still alive."""
    models = (each.model() for each in list(_watched.values()))
    return [model for model in models if model is not None]


def watch_wrapping_ddp(watched: WatchedModel, stepper: Stepper) -> None:
    """Watch the DDP that is calling this model, if any: the model was wrapped later."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    # In each forward: what is known already is asked first.
    is_new = ddp is not None and id(ddp) not in _watched
    if is_new and not models.makes_steps(ddp) and attach(ddp, stepper):
        around = _watched[id(ddp)]
        # It does the same work.
        around.flops_per_unit, around.by_samples = watched.flops_per_unit, watched.by_samples
        around.shared = watched.shared


def watch_compiled_in_place() -> None:
    """Measure models that `module.compile()` has compiled in place, from outside of the graph."""
    for model in watched():
        call = getattr(model, "_compiled_call_impl", None)
        if call is not None and not isinstance(call, _CompiledInPlace):
            # Torch itself leaves it out of copies and pickles of a module.
            model._compiled_call_impl = _CompiledInPlace(model, call)


class _CompiledInPlace:
    """Calls a module's compiled call, and measures it: its hooks are compiled away."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        self.call = call
        self._module = ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, stepper = self._module(), _stepper
        if module is None or (stepper is not None and not stepper.measured):
            return self.call(*args, **kwargs)
        # Compiled code is valid for the hooks that there were when it was compiled.
        was_on = every_module.take_off()
        before_forward(module, args, kwargs)
        try:
            output = self.call(*args, **kwargs)
        except BaseException:
            after_forward(module, args, None)
            raise
        finally:
            if was_on:
                every_module.put_on()
        after_forward(module, args, output)
        return output


# Where a class copies its models itself, the copies have our hooks, and pickle finds these by name.
# Torch's tools may copy hooks to modules of their own, and forget with which arguments they are
# called: so each argument has a default, and more of them are no error.


def before_forward(module: nn.Module, args: Any = (), kwargs: Any = None, *_: Any) -> None:
    """The hook before the forward of a watched model."""
    # Traced into a graph this would break it; the compiled model then calls no hook. In
    # torch.jit.trace our variables would give their names to tensors of the graph.
    if is_dynamo_compiling() or _trace() is not None:
        return
    stepper, watched = _stepper, _watched.get(id(module))
    if is_compiling() or watched is None or stepper is None or not stepper.alive:
        return
    watched.called = True
    if stepper.measured:
        stepper.act("before forward", stepper.forward_began, watched, module, args, kwargs)


def after_forward(module: nn.Module, args: Any = (), output: Any = None, *_: Any) -> None:
    """The hook after it, also where it has raised."""
    if is_dynamo_compiling() or is_compiling() or _is_tracing():
        return
    stepper, watched = _stepper, _watched.get(id(module))
    if watched is None or stepper is None or not stepper.alive or not stepper.measured:
        return
    stepper.act("after forward", _forward_ended, stepper, watched, module, output)


def _forward_ended(stepper: Stepper, watched: WatchedModel, module: nn.Module, output: Any) -> None:
    if stepper.forward_ended(watched, module, output):
        # No full backward hook: that one wraps the outputs, and in-place changes of them then raise
        # in the user's code.
        for tensor in differentiable(output):
            stepper.backward_hook.put_on(tensor, inspection.of_tensor(tensor, "grad_fn"))


def differentiable(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output that backward may start from, whatever they are wrapped in."""
    left = [output]
    # The list grows meanwhile: the upper levels, where a loss mostly is, come first.
    for value in islice(left, _MOST_OUTPUTS):
        kind = type(value)
        if issubclass(kind, _Tensor):
            # A plain tensor is asked directly: one call less for each.
            if (
                value.requires_grad
                if kind is _Tensor
                else inspection.of_tensor(value, "requires_grad")
            ):
                yield value
        elif issubclass(kind, dict):
            left.extend(islice(dict.values(value), _MOST_OF_ONE))
        elif issubclass(kind, list):
            left.extend(islice(list.__iter__(value), _MOST_OF_ONE))
        elif issubclass(kind, tuple):
            left.extend(islice(tuple.__iter__(value), _MOST_OF_ONE))
        elif value is output or inspection.maps(kind):
            # A class of the user's: one level of its attributes.
            left.extend(islice(inspection.attributes(value).values(), _MOST_OF_ONE))


# -- what is saved or copied of a model is without our hooks


def _keep_out(module: nn.Module) -> None:
    """Leave our hooks out of `torch.save(model)`, which then loads without us, and of copies."""
    # Weakly, and not by `setattr`, which torch overrides: it is no part of the model.
    module.__dict__[_STATE] = partial(_state, ref(module))


def _state(module_of: Callable[[], nn.Module | None]) -> Any:
    module: Any = module_of()
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state  # of a class with a format of its own
    state = {name: value for name, value in state.items() if name != _STATE}
    for kind in _KINDS:
        given = state.get(kind)
        if not isinstance(given, dict):
            continue
        left_out = {key for key, hook in given.items() if hook in _ALL}
        if left_out:
            for name in (kind, *(kind + more for more in _MORE)):
                if isinstance(found := state.get(name), dict):
                    kept = ((k, v) for k, v in found.items() if k not in left_out)
                    state[name] = OrderedDict(kept)
    return state


_ALL = frozenset((before_forward, after_forward))
