"""The hooks on a model: module-level functions that know their models and ignore copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from otel_ddp import containment
from otel_ddp.torch.stepper import Stepper

_MOST_OUTPUTS = 64
# What a tensor's own register_hook calls.
_REGISTER = "_register_hook_dict"
_OURS = "otel_ddp"
_Tensor = torch.Tensor


class _Watched:
    """A model that is watched; found by its id, for a weak dictionary is four times as slow."""

    __slots__ = (
        *("by_samples", "flops_per_unit", "forwards", "handles", "model", "samples"),
        *("stepper", "syncs_buffers", "tokens"),
    )

    def __init__(self, model: nn.Module, stepper: Stepper, among: dict[int, _Watched]) -> None:
        key = id(model)
        # Never the model itself: most of a device's memory hangs on it.
        self.model = ref(model, lambda _: among.pop(key, None))
        self.stepper = stepper
        self.handles: list[Any] = []
        # Whether it may give every rank the same buffers before a forward.
        self.syncs_buffers = False
        # Of forward and backward, for a token, or for a sample where there are none: None as long
        # as that is not known, 0 where it never will be.
        self.flops_per_unit: float | None = None
        self.by_samples = False
        self.forwards = self.samples = self.tokens = 0


# A deep copy (an EMA model, say) carries the hooks along, but is not in here.
_watched: dict[int, _Watched] = {}
# The module inside of DDP, where DDP may wait before it.
_inner: dict[int, _Watched] = {}


def attach(module: nn.Module, stepper: Stepper) -> bool:
    """Watch a model, the outermost object that the training loop calls; False if it is already."""
    if id(module) in _watched:
        return False
    watched = _watched[id(module)] = _Watched(module, stepper, _watched)
    watched.handles += [
        module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True),
        # Also where forward raises: the time after that is not forward.
        module.register_forward_hook(_after_forward, prepend=True, always_call=True),
    ]
    if isinstance(module, DistributedDataParallel) and _has_buffers(module):
        watched.syncs_buffers = True
        _inner[id(module.module)] = _Watched(module.module, stepper, _inner)
        watched.handles.append(module.module.register_forward_pre_hook(_before_inner))
    return True


def _has_buffers(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.broadcast_buffers) and any(True for _ in ddp.module.buffers())


def detach() -> None:
    """Take all hooks off again."""
    for watched in list(_watched.values()):
        for handle in watched.handles:
            handle.remove()
        model: Any = watched.model()
        if model is not None and isinstance(model._compiled_call_impl, _CompiledInPlace):
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
        _before_forward(module, args, kwargs)
        try:
            output = self.call(*args, **kwargs)
        except BaseException:
            _after_forward(module, args, None)
            raise
        _after_forward(module, args, output)
        return output


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Traced into a graph this would break it; the compiled model then calls no hook.
    if is_compiling():
        return
    watched = _watched.get(id(module))
    if watched is None or not watched.stepper.alive:
        return
    try:
        watched.stepper.forward_began(watched, module, args, kwargs)
    except containment.ANYTHING:
        watched.stepper.failed("before forward")


def _before_inner(module: nn.Module, args: tuple[Any, ...]) -> None:
    if is_compiling():
        return
    watched = _inner.get(id(module))
    if watched is None or not watched.stepper.alive:
        return
    try:
        watched.stepper.buffers_arrived()
    except containment.ANYTHING:
        watched.stepper.failed("before the inner forward")


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if is_compiling():
        return
    watched = _watched.get(id(module))
    if watched is None or not watched.stepper.alive:
        return
    stepper = watched.stepper
    try:
        if not stepper.forward_ended(watched, module, output):
            return
        # Not a full backward hook: that one wraps the outputs, and in-place changes of them then
        # raise in the user's code.
        if type(output) is _Tensor:
            _listen(output, stepper)
        else:
            for tensor in differentiable(output):
                # It may be the same one each time: one that is kept beside the model.
                if (marks := getattr(tensor.grad_fn, "metadata", None)) is not None:
                    if _OURS in marks:
                        continue
                    marks[_OURS] = True
                _listen(tensor, stepper)
    except containment.ANYTHING:
        stepper.failed("after forward")


def _listen(tensor: torch.Tensor, stepper: Stepper) -> None:
    """`tensor.register_hook(stepper.on_gradient)` at a third of its price, leaving it as it is."""
    node = tensor.grad_fn
    if node is None:
        return  # a parameter, which lives on: a hook each time would be one more each time
    if (register := getattr(node, _REGISTER, None)) is not None:
        register(stepper.ear)
    else:
        tensor.register_hook(stepper.on_gradient)


def differentiable(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output that backward may start from, whatever they are wrapped in."""
    left = [output]
    seen = 0
    while left and seen < _MOST_OUTPUTS:
        value = left.pop()
        seen += 1
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                yield value
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        elif value is output and hasattr(value, "__dict__"):
            # A class of the user's: one level of its attributes.
            left.extend(vars(value).values())
