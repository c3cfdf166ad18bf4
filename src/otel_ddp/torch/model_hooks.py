"""The hooks on a model: module-level functions that know their models and ignore copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from otel_ddp import containment
from otel_ddp.torch.stepper import Stepper

_MOST_OUTPUTS = 64

# A deep copy (an EMA model, say) carries the hooks along, but is not in here.
_watched: WeakKeyDictionary[nn.Module, Stepper] = WeakKeyDictionary()
_inner: WeakKeyDictionary[nn.Module, Stepper] = WeakKeyDictionary()
_handles: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def attach(module: nn.Module, stepper: Stepper) -> None:
    """Watch a model: the outermost object that the training loop calls."""
    if module in _watched:
        return
    _watched[module] = stepper
    handles = [
        module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True),
        # Also where forward raises: the time after that is not forward.
        module.register_forward_hook(_after_forward, prepend=True, always_call=True),
    ]
    if isinstance(module, DistributedDataParallel):
        _inner[module.module] = stepper
        handles.append(module.module.register_forward_pre_hook(_before_inner))
    _handles[module] = handles


def detach() -> None:
    """Take all hooks off again."""
    for handles in list(_handles.values()):
        for handle in handles:
            handle.remove()
    _handles.clear()
    _watched.clear()
    _inner.clear()


def watched() -> list[nn.Module]:
    """The models that are watched and still alive."""
    return list(_watched)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Traced into a graph this would break it; the compiled model then calls no hook.
    if torch.compiler.is_compiling():
        return
    stepper = _watched.get(module)
    if stepper is None or not stepper.alive:
        return
    try:
        training = torch.is_grad_enabled() and module.training
        waits = (
            training
            and isinstance(module, DistributedDataParallel)
            and bool(module.will_sync_module_buffers())
        )
        stepper.forward_began(training, waits, args, kwargs)
    except containment.ANYTHING:
        stepper.failed("before forward")


def _before_inner(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    stepper = _inner.get(module)
    if stepper is None or not stepper.alive:
        return
    try:
        stepper.buffers_arrived()
    except containment.ANYTHING:
        stepper.failed("before the inner forward")


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    stepper = _watched.get(module)
    if stepper is None or not stepper.alive:
        return
    try:
        if stepper.forward_ended():
            for tensor in _differentiable(output):
                # Not a full backward hook: that one wraps the outputs, and in-place changes of
                # them then raise in the user's code.
                tensor.register_hook(stepper.gradient_arrived)
    except containment.ANYTHING:
        stepper.failed("after forward")


def _differentiable(output: Any) -> Iterator[torch.Tensor]:
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
