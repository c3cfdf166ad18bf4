"""Keeps our hooks out of what is saved or copied of a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from torch import nn

# Pickle and copy look this up on the object itself, before its class.
_STATE = "__getstate__"
# Hooks of a module -> what else it keeps of each of them, under the same keys.
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def keep_out(module: nn.Module, hooks: frozenset[Callable[..., Any]]) -> None:
    """Leave these hooks out of `torch.save(model)`, which then loads without us, and of copies."""
    # Weakly, and not by `setattr`, which torch overrides: it is no part of the model.
    module.__dict__[_STATE] = partial(_state, ref(module), hooks)


def let_in(module: nn.Module) -> None:
    """Leave the module as it was."""
    module.__dict__.pop(_STATE, None)


def _state(module_of: Callable[[], nn.Module | None], hooks: frozenset[Callable[..., Any]]) -> Any:
    module: Any = module_of()
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state  # of a class with a format of its own
    state = {name: value for name, value in state.items() if name != _STATE}
    for kind, more in _HOOKS.items():
        given = state.get(kind)
        if not isinstance(given, dict):
            continue
        left_out = {key for key, hook in given.items() if hook in hooks}
        if left_out:
            for name in (kind, *more):
                if isinstance(found := state.get(name), dict):
                    kept = ((k, v) for k, v in found.items() if k not in left_out)
                    state[name] = OrderedDict(kept)
    return state
