"""The hooks on all optimizers; they act only for optimizers of watched models."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from otel_ddp import errors
from otel_ddp.recording.steps import CountedSteps
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.steps.stepper import Stepper

# The attributes in which wrappers hold an optimizer; and the most objects that are searched.
_WITHIN = ("optimizer", "_optimizer", "optim", "original_optimizer")
_DEEPEST = 8


# The handles of the hooks before and after a step.
_before: Any = None
_after: Any = None
_stepper: Stepper | None = None
_counted: CountedSteps | None = None
# Optimizer id -> whether it trains a watched model, and the weak reference that removes the entry.
_known: dict[int, tuple[bool, Any]] = {}


def attach(stepper: Stepper) -> None:
    """Put the hooks on all optimizers."""
    global _stepper, _counted, _after
    _stepper, _counted = stepper, stepper.progress.counted
    switch(True)
    if _after is None:
        _after = register_optimizer_step_post_hook(after_step)


def switch(on: bool) -> None:
    """Put the pre-step hook on, or take it off: then the post-step hook mostly only counts."""
    global _before
    if on and _before is None:
        _before = register_optimizer_step_pre_hook(before_step)
    elif not on and _before is not None:
        _before.remove()
        _before = None
    if _after is not None:
        # Replace the post-step hook in place: torch may be iterating over the hooks.
        _after.hooks_dict_ref()[_after.id] = after_step if on else count_step


def forget(own: Any) -> None:
    """A new model is watched: check all optimizers again, except *own*, which the user passed."""
    _known.clear()
    if isinstance(own, Optimizer):
        _note(own, True)


def forget_others() -> None:
    """Check all optimizers without a watched model again: a model found since may be theirs."""
    for key, (owned, _) in list(_known.items()):
        if not owned:
            _known.pop(key, None)


def torchs_own(given: Any) -> Optimizer | None:
    """The optimizer whose step runs torch's hooks: the given object, or an optimizer inside it."""
    found: Optimizer | None = None
    level, seen = [given], 0
    while level and seen < _DEEPEST:
        each = level.pop(0)
        seen += 1
        if isinstance(each, Optimizer):
            # A wrapper that subclasses Optimizer runs torch's hooks in its `step` only if it calls
            # Optimizer's `__init__`. If its `step` runs them, a step of an optimizer inside the
            # wrapper belongs to the wrapper's step.
            if getattr(type(each).step, "hooked", False):
                return each
            found = found or each
        inner = [errors.attempt(partial(getattr, each, name, None), None) for name in _WITHIN]
        level += [one for one in inner if one is not None]
    return found


def detach() -> None:
    """Take the hooks off."""
    global _stepper, _counted, _after
    _stepper = _counted = None
    switch(False)
    if _after is not None:
        _after.remove()
        _after = None
    _known.clear()


def _is_ours(optimizer: Optimizer) -> bool:
    # Compare parameters only at the optimizer's first step: until then sharding may replace them.
    models = model_hooks.trained()
    mine = {id(p) for module in models for p in module.parameters()}
    owned = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    # This finds an optimizer that holds copies of the parameters, as in DeepSpeed's engine.
    owned = owned or any(torchs_own(module) is optimizer for module in models)
    _note(optimizer, owned)
    stepper = _stepper
    if not owned and stepper is not None and stepper.search is not None:
        stepper.search.unknown_optimizer_came()
    return owned


def _note(optimizer: Optimizer, owned: bool) -> None:
    key = id(optimizer)
    _known[key] = (owned, ref(optimizer, partial(_known.pop, key)))


def before_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None, *_: Any) -> None:
    """The hook before the step of any optimizer."""
    if is_dynamo_compiling() and _may_be_one_graph(optimizer):
        return
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    if stepper.captures():
        if _owned(optimizer):
            stepper.optimizer_capture_began()
    elif stepper.measured:
        stepper.act("before the optimizer", _step_begins, stepper, optimizer, args, kwargs)


def _step_begins(stepper: Stepper, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _owned(optimizer):
        # Any argument of `step` besides `self` is a closure, unless a wrapper passes None.
        given = (*args[1:], *(kwargs or {}).values())
        stepper.optimizer_began(optimizer, any(each is not None for each in given))


def count_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """The post-step hook while other hooks are off: it only counts most optimizer steps."""
    counted = _counted
    if counted is None or not counted.counts(optimizer):
        after_step(optimizer)


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """The post-step hook while hooks are on, and always if compiled code has a guard on it."""
    if is_dynamo_compiling():
        if _may_be_one_graph(optimizer):
            return
    elif (counted := _counted) is not None and counted.counts(optimizer):
        return
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    if stepper.captures():
        if _owned(optimizer):
            stepper.optimizer_capture_ended(optimizer)
        return
    if not stepper.measured and stepper.count_step(optimizer):
        return
    stepper.act("after the optimizer", _step_ended, optimizer, stepper)


def _step_ended(optimizer: Optimizer, stepper: Stepper) -> None:
    known = id(optimizer) in _known
    if not _owned(optimizer):
        if stepper.search is not None:
            stepper.search.unknown_optimizer_stepped()
        return
    if not stepper.measured:
        stepper.another_stepped(optimizer)
        return
    if not known:
        # Its step began before its model was watched: the closure has just called the model.
        stepper.optimizer_began(optimizer, False)
    stepper.optimizer_ended(optimizer)
    if stepper.searching:
        stepper.search.model_stepped()


def _owned(optimizer: Optimizer) -> bool:
    known = _known.get(id(optimizer))
    return known[0] if known is not None else _is_ours(optimizer)


def _may_be_one_graph(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step may be compiled into a single graph, which our hook would split.

    Users may require a single graph (`fullgraph=True`). Torch's own optimizers split it anyway.
    """
    return not type(optimizer).__module__.startswith("torch.")
