"""The hook on every module there is: on while a model is looked for and none is being called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as _modules
from torch.nn.modules.module import register_module_forward_pre_hook

_hook: Callable[..., None] | None = None
_handle: Any = None
# Private: what torch.compile's modules ask before each call. A torch without it warns of nothing.
_ASKED = "_has_any_global_hook"
_torch_says: Callable[[], Any] | None = getattr(_modules, _ASKED, None)


def expect(hook: Callable[..., None] | None) -> None:
    """What every call of a module is to call while it is on; None: nothing any more."""
    global _hook
    take_off()
    _hook = hook
    if _torch_says is not None:
        setattr(_modules, _ASKED, _torch_says if hook is None else _hooks_of_others)


def put_on() -> None:
    """From here on every call of a module calls it, once however often it is put on."""
    global _handle
    if _handle is None and _hook is not None:
        _handle = register_module_forward_pre_hook(_hook)


def take_off() -> bool:
    """No call of a module calls it; whether it was on."""
    global _handle
    handle, _handle = _handle, None
    if handle is None:
        return False
    handle.remove()
    return True


def _hooks_of_others() -> bool:
    """Whether the user has put hooks on every module.

    A compiled module warns that those are called twice, or raises where warnings are errors. Ours
    may be called as often as it likes.
    """
    was_on = take_off()
    try:
        return bool(_torch_says and _torch_says())
    finally:
        if was_on:
            put_on()
