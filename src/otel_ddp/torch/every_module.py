"""The hook on every module there is: on while a model is looked for and none is being called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

_hook: Callable[..., None] | None = None
_handle: Any = None


def expect(hook: Callable[..., None] | None) -> None:
    """What every call of a module is to call while it is on; None: nothing any more."""
    global _hook
    take_off()
    _hook = hook


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
