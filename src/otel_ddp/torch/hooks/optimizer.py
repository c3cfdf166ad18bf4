"""The global optimizer hooks, for the optimizers of watched models."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol
from weakref import ref

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from otel_ddp import containment
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.stepper import InGraph, Stepper

# Where wrappers keep the optimizer that does their work, and how deep one may lie.
_WITHIN = ("optimizer", "_optimizer", "optim", "original_optimizer")
_DEEPEST = 8


class Search(Protocol):
    """Looks for models, and hears of steps."""

    on: bool

    def stepped(self) -> None: ...
    def another_optimizer(self) -> None: ...
    def stepped_unseen(self) -> None: ...


_handles: list[Any] = []
_search: Search | None = None
_stepper: Stepper | None = None
_in_graph = InGraph()
# By id: whether it is one of ours, else how many parameters it has; and what forgets it when it
# goes.
_known: dict[int, tuple[bool, int, Any]] = {}
_UNKNOWN = (False, -1, None)


def attach(stepper: Stepper) -> None:
    """Listen to every optimizer; those of other models are ignored."""
    global _stepper
    _stepper = stepper
    stepper.in_graph = _in_graph
    _in_graph.stepped = False
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))


def expect(optimizer: Any) -> None:
    """Another model is watched: ask again whose each optimizer is, but for one that is ours."""
    _known.clear()
    if isinstance(optimizer, Optimizer):
        _keep(optimizer, True)


def tell(search: Search | None) -> None:
    """Who looks for models, if they are looked for."""
    global _search
    _search = search


def ask_again() -> None:
    """A model was found: optimizers that were none of ours may be its own."""
    for key, (owned, _, _) in list(_known.items()):
        if not owned:
            _known.pop(key, None)


def heard(given: Any) -> Optimizer | None:
    """The optimizer whose step calls torch's hooks: this one, or one that it wraps."""
    found: Optimizer | None = None
    level, seen = [given], 0
    while level and seen < _DEEPEST:
        each = level.pop(0)
        seen += 1
        if isinstance(each, Optimizer):
            # A wrapper may be an Optimizer by name alone, that has never called its __init__. One
            # whose own step calls the hooks is not looked into: what it calls is a part of it.
            if getattr(type(each).step, "hooked", False):
                return each
            found = found or each
        inner = [containment.attempt(partial(getattr, each, name, None), None) for name in _WITHIN]
        level += [one for one in inner if one is not None]
    return found


def detach() -> None:
    """Stop listening."""
    global _stepper
    _stepper = None
    for handle in _handles:
        handle.remove()
    _handles.clear()
    _known.clear()


def _ours_by_now(optimizer: Optimizer, size: int) -> bool:
    """Whether one that was none of ours has become one: it may be given more parameters."""
    return _size(optimizer) != size and _owned(optimizer)


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _owned(optimizer: Optimizer) -> bool:
    # Asked at its first step, not before: sharding replaces a model's parameters.
    mine = {id(p) for module in model_hooks.watched() for p in module.parameters()}
    owned = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    _keep(optimizer, owned)
    if not owned and _search is not None:
        _search.another_optimizer()
    return owned


def _keep(optimizer: Optimizer, owned: bool) -> None:
    key = id(optimizer)
    size = 0 if owned else _size(optimizer)
    _known[key] = (owned, size, ref(optimizer, partial(_known.pop, key)))


def _whole(optimizer: Optimizer) -> bool:
    """Whether its step may be compiled in one piece, which a hook of ours would break.

    An error, where the user wants it whole. Those of torch's own are broken by themselves.
    """
    return not type(optimizer).__module__.startswith("torch.")


def _is_given_some(args: Any, kwargs: Any) -> bool:
    return any(each is not None for each in (*args, *(kwargs or {}).values()))


def _before_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None, *_: Any) -> None:
    if is_compiling() and _whole(optimizer):
        return
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    try:
        known = _known.get(id(optimizer), _UNKNOWN)
        if known[0] or _ours_by_now(optimizer, known[1]):
            # What `step` is given beside its optimizer is a closure, or None by what wraps it.
            given = len(args) > 1 or bool(kwargs)
            stepper.optimizer_began(optimizer, given and _is_given_some(args[1:], kwargs))
    except containment.ANY_ERROR:
        stepper.failed("before the optimizer")


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if is_compiling() and _whole(optimizer):
        # Whoever runs the graph does this, each time.
        _in_graph.stepped = True
        return
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    try:
        known = _known.get(id(optimizer), _UNKNOWN)
        if known[0] or _ours_by_now(optimizer, known[1]):
            if not known[0]:
                # Its closure was the first to call its model.
                stepper.optimizer_began(optimizer, False)
            stepper.optimizer_ended(optimizer)
            if _search is not None and _search.on:
                _search.stepped()
        elif _search is not None:
            _search.stepped_unseen()
    except containment.ANY_ERROR:
        stepper.failed("after the optimizer")
