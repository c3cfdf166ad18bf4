"""Puts hooks on watched models, and on all modules while models are searched for.

The hooks are module-level functions. They ignore copies of watched models.
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
from torch.nn.modules import module as _modules
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from otel_ddp.torch import inspection, models
from otel_ddp.torch.steps.open_step import outside_of_backward
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.watched_model import WatchedModel

_MOST_OUTPUTS, _MOST_OF_ONE = 64, 48
_Tensor = torch.Tensor
_is_tracing = torch._C._is_tracing
# Cheap enough for a hook: torch itself calls this function in each call of a module.
_trace = torch._C._get_tracing_state

# The key of our hooks in a module's dictionaries.
_HOOK = "otel_ddp model"
# Pickle and copy look this method up on the instance before the class, so an instance can have its
# own.
_STATE = "__getstate__"
# The attributes that hold a module's hooks; and the suffixes of further attributes, which hold
# options of these hooks under the same keys.
_KINDS, _MORE = ("_forward_pre_hooks", "_forward_hooks"), ("_with_kwargs", "_always_called")

_stepper: Stepper | None = None
# By id of the model, so that replicas of DataParallel, which copy our hooks, are not found here.
_watched: dict[int, WatchedModel] = {}
# Modules whose call is a whole training step. They get no hooks; only readings use them.
_around: dict[int, Callable[[], nn.Module | None]] = {}


def attach(module: nn.Module, stepper: Stepper) -> bool:
    """Watch a model (the outermost module that the loop calls); False if it is watched already."""
    global _stepper
    _stepper = stepper
    if id(module) in _watched:
        return False
    watched = _watch(module)
    # A ScriptModule does not support hooks, so it is not watched inside a DDP.
    inside = module.module if isinstance(module, DistributedDataParallel) else None
    if inside is not None and not isinstance(inside, torch.jit.ScriptModule):
        watched.syncs_buffers = bool(module.broadcast_buffers) and any(
            True for _ in inside.buffers()
        )
        # Watch the wrapped module as well: DDP may wait before calling it, and a validation may
        # call it directly.
        if id(inside) not in _watched:
            _watch(inside)
    if id(module) not in _watched:
        # A signal handler has meanwhile detached all hooks: take off the ones just put on, too.
        take_off(module, *_ALL)
        detach()
        return False
    return True


def _watch(module: nn.Module) -> WatchedModel:
    watched = _watched[id(module)] = WatchedModel(module, _watched)
    # If the model is a copy of a watched one, it has a copy of our hooks: take them off first.
    take_off(module, *_ALL)
    _put_on(module)
    _hide_hooks(module)
    return watched


def _put_on(module: Any) -> None:
    """Put our hooks first, as torch's `prepend=True` does, but under our own key."""
    for kind, more, hook in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, before_forward),
        # `always_called` means also if forward raises: the forward phase must end then, too.
        (module._forward_hooks, module._forward_hooks_always_called, after_forward),
    ):
        kind[_HOOK] = hook
        kind.move_to_end(_HOOK, last=False)
        more[_HOOK] = True


def switch(on: bool) -> None:
    """Put the hooks of watched models on, or take them off, between two steps.

    Models that compiled code calls keep their hooks: the code has guards on hooks, so that each
    change would cause a recompilation.
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
                model._forward_pre_hooks,
                model._forward_pre_hooks_with_kwargs,
                model._forward_hooks,
                model._forward_hooks_always_called,
            ):
                hooks.pop(_HOOK, None)


def compiling(stepper: Stepper) -> None:
    """A compilation begins: models that are not being called may become parts of its graph.

    The graph then has guards on their hooks, so each switch of these hooks would recompile it. From
    now on the hooks stay on. Leaving them off instead would miss direct calls of such a model, as
    in an evaluation.
    """
    if stepper.progress.another_trains() or not outside_of_backward():
        return
    calls = {id(each.get("self")) for each in inspection.module_calls(sys._getframe())}
    for key, watched in list(_watched.items()):
        # A wrapper returned by `torch.compile` (it has `_orig_mod`) is not a part of the graph.
        if key in calls or watched.in_graph or hasattr(watched.model(), "_orig_mod"):
            continue
        stepper.go_on_measured()
        watched.in_graph = True


def take_off(module: nn.Module, *ours: Any) -> None:
    """Take these hooks off a module."""
    # Find the hooks by identity, as a copied module has our hooks, but we have no handles of them.
    for kind in _KINDS:
        hooks = getattr(module, kind)
        for key, hook in list(hooks.items()):
            if any(hook is each for each in ours):
                hooks.pop(key, None)
                for more in _MORE:
                    getattr(module, kind + more, {}).pop(key, None)


def detach() -> None:
    """Take our hooks off all watched models."""
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
    """Remember a module that calls watched models and whose call is a whole step.

    Returns False if it is known already.
    """
    if id(module) in _around:
        return False
    _around[id(module)] = ref(module, partial(_around.pop, id(module)))
    return True


def trained() -> list[nn.Module]:
    """The models in training: watched ones, and modules around them."""
    around = (each() for each in list(_around.values()))
    return [*watched(), *(model for model in around if model is not None)]


def is_watched(module: nn.Module) -> bool:
    """Whether this model is watched."""
    return id(module) in _watched


def is_in_watched(module: nn.Module) -> bool:
    """Whether this model is watched, or wrapped by a watched one."""
    return is_watched(module) or any(each.inside() is module for each in list(_watched.values()))


def watched() -> list[nn.Module]:
    """The watched models that are alive."""
    models = (each.model() for each in list(_watched.values()))
    return [model for model in models if model is not None]


def watch_wrapping_ddp(watched: WatchedModel, stepper: Stepper) -> None:
    """Watch the DDP that is calling this model: the user may have wrapped it after `instrument`."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    # Runs in each forward, so the cheapest check comes first.
    is_new = ddp is not None and id(ddp) not in _watched
    if is_new and not models.makes_steps(ddp) and attach(ddp, stepper):
        around = _watched[id(ddp)]
        # The DDP does the work of the model inside it, so the same FLOPs and samples apply.
        around.flops_per_unit, around.by_samples = watched.flops_per_unit, watched.by_samples
        around.shared = watched.shared


def watch_compiled_in_place() -> None:
    """Measure models that `module.compile()` compiled in place, by wrapping the compiled call."""
    for model in watched():
        call = getattr(model, "_compiled_call_impl", None)
        if call is not None and not isinstance(call, _CompiledInPlace):
            # Copies and pickles do not contain our wrapper: torch leaves this attribute out.
            model._compiled_call_impl = _CompiledInPlace(model, call)


class _CompiledInPlace:
    """Measures a module compiled in place, by wrapping its compiled call: its hooks never run."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        self.call = call
        self._module = ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, stepper = self._module(), _stepper
        if module is None or (stepper is not None and not stepper.measured):
            return self.call(*args, **kwargs)
        # Compiled code has guards on global hooks: with ours on, it would be recompiled.
        was_on = take_off_all()
        before_forward(module, args, kwargs)
        try:
            output = self.call(*args, **kwargs)
        except BaseException:
            after_forward(module, args, None)
            raise
        finally:
            if was_on:
                put_on_all()
        after_forward(module, args, output)
        return output


# Our hooks are module-level functions, because pickle stores functions by name: a class may copy
# its models, with our hooks, by a method of its own. All arguments have defaults and further ones
# are ignored, because tools may copy hooks to other modules and call them with other arguments.


def before_forward(module: nn.Module, args: Any = (), kwargs: Any = None, *_: Any) -> None:
    """The hook before the forward of a watched model."""
    # Do nothing while a model is compiled or traced: Dynamo cannot trace our code, and
    # torch.jit.trace would name tensors of its graph after our variables.
    if is_dynamo_compiling() or _trace() is not None:
        return
    stepper, watched = _stepper, _watched.get(id(module))
    if is_compiling() or watched is None or stepper is None or not stepper.alive:
        return
    watched.called = True
    if stepper.measured:
        stepper.act("before forward", stepper.forward_began, watched, module, args, kwargs)


def after_forward(module: nn.Module, args: Any = (), output: Any = None, *_: Any) -> None:
    """The hook after the forward of a watched model, also called after an exception."""
    if is_dynamo_compiling() or is_compiling() or _is_tracing():
        return
    stepper, watched = _stepper, _watched.get(id(module))
    if watched is None or stepper is None or not stepper.alive or not stepper.measured:
        return
    stepper.act("after forward", _forward_ended, stepper, watched, module, output)


def _forward_ended(stepper: Stepper, watched: WatchedModel, module: nn.Module, output: Any) -> None:
    if stepper.forward_ended(watched, module, output):
        # A full backward hook would wrap the outputs, and user code that changes an output in place
        # would then raise. So put a hook on each tensor instead.
        for tensor in differentiable(output):
            stepper.backward_hook.put_on(tensor, inspection.of_tensor(tensor, "grad_fn"))


def differentiable(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output, in any container, from which a backward may start."""
    left = [output]
    # The loop appends to the list that it iterates over. So the search is breadth first: a loss is
    # mostly in the upper levels.
    for value in islice(left, _MOST_OUTPUTS):
        kind = type(value)
        if issubclass(kind, _Tensor):
            # The direct attribute access is faster, but safe only for plain tensors.
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
        elif value is output or inspection.is_mapping(kind):
            # An object of a user's class: search one level of its attributes.
            left.extend(islice(inspection.attributes(value).values(), _MOST_OF_ONE))


# -- saved and copied models have no hooks of ours


def _hide_hooks(module: nn.Module) -> None:
    """Keep our hooks out of copies and of `torch.save(model)`, so it loads without otel_ddp."""
    # Use a weak reference, and bypass torch's `__setattr__`: the model itself stays unchanged.
    module.__dict__[_STATE] = partial(_state, ref(module))


def _state(module_of: Callable[[], nn.Module | None]) -> Any:
    module: Any = module_of()
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state  # a class with its own format
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


# -- the hook on all modules: on while models are searched for and none is being called

_global_hook: Callable[..., None] | None = None
_handle: Any = None
# A private function of torch. Compiled modules call it before each call, and warn if it returns
# True. A torch without this function does not warn, either.
_HAS_GLOBAL_HOOK = "_has_any_global_hook"
_torchs_own: Callable[[], Any] | None = getattr(_modules, _HAS_GLOBAL_HOOK, None)


def set_global_hook(hook: Callable[..., None] | None) -> None:
    """Set the hook on all modules, still off until `put_on_all`. None: remove the hook."""
    global _global_hook
    take_off_all()
    _global_hook = hook
    if _torchs_own is not None:
        setattr(_modules, _HAS_GLOBAL_HOOK, _torchs_own if hook is None else _hooks_of_others)


def put_on_all() -> None:
    """Switch the hook on all modules on: torch calls it before each call of a module."""
    global _handle
    if _handle is None and _global_hook is not None:
        _handle = register_module_forward_pre_hook(_global_hook)


def take_off_all() -> bool:
    """Switch the hook on all modules off; returns whether it was on."""
    global _handle
    handle, _handle = _handle, None
    if handle is None:
        return False
    handle.remove()
    return True


def _hooks_of_others() -> bool:
    """Whether there are global module hooks besides ours; replaces torch's function.

    A compiled module warns that such hooks may run twice. For ours that does no harm, and with
    warnings as errors the warning would raise.
    """
    was_on = take_off_all()
    try:
        return bool(_torchs_own and _torchs_own())
    finally:
        if was_on:
            put_on_all()
