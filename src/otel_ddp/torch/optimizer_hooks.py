"""The global optimizer hooks, for the optimizers of watched models."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from otel_ddp import containment
from otel_ddp.torch import model_hooks
from otel_ddp.torch.stepper import Stepper

_handles: list[Any] = []
_stepper: Stepper | None = None
_ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()


def attach(stepper: Stepper) -> None:
    """Listen to every optimizer; those of other models are ignored."""
    global _stepper
    _stepper = stepper
    _ours.clear()
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))


def detach() -> None:
    """Stop listening."""
    global _stepper
    _stepper = None
    for handle in _handles:
        handle.remove()
    _handles.clear()
    _ours.clear()


def _owned(optimizer: Optimizer) -> bool:
    known = _ours.get(optimizer)
    if known is None:
        # Asked at its first step, not before: sharding replaces a model's parameters.
        mine = {id(p) for module in model_hooks.watched() for p in module.parameters()}
        known = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        _ours[optimizer] = known
    return known


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    try:
        if _owned(optimizer):
            stepper.optimizer_began()
    except containment.ANYTHING:
        stepper.failed("before the optimizer")


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    try:
        if _owned(optimizer):
            stepper.optimizer_ended(id(optimizer))
    except containment.ANYTHING:
        stepper.failed("after the optimizer")
