"""The hook on all modules: on while models are searched for and none is being called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as _modules
from torch.nn.modules.module import register_module_forward_pre_hook

_hook: Callable[..., None] | None = None
_handle: Any = None
# Private: compiled modules call this before each call. A torch without it does not warn either.
_HAS_GLOBAL_HOOK = "_has_any_global_hook"
_torchs_own: Callable[[], Any] | None = getattr(_modules, _HAS_GLOBAL_HOOK, None)


def set_hook(hook: Callable[..., None] | None) -> None:
    """Choose the hook, which is off at first; None: no hook any more."""
    global _hook
    take_off()
    _hook = hook
    if _torchs_own is not None:
        setattr(_modules, _HAS_GLOBAL_HOOK, _torchs_own if hook is None else _hooks_of_others)


def put_on() -> None:
    """From here on each call of a module calls the hook, once, however often it is put on."""
    global _handle
    if _handle is None and _hook is not None:
        _handle = register_module_forward_pre_hook(_hook)


def take_off() -> bool:
    """From here on no call of a module calls the hook; whether it was on."""
    global _handle
    handle, _handle = _handle, None
    if handle is None:
        return False
    handle.remove()
    return True


def _hooks_of_others() -> bool:
    """Whether the user has put hooks on every module.

    A compiled module warns that such hooks are called twice, or raises where warnings are errors.
    Ours may be called twice.
    """
    was_on = take_off()
    try:
        return bool(_torchs_own and _torchs_own())
    finally:
        if was_on:
            put_on()
