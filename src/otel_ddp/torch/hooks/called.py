"""Learns of the calls of a function of torch's that has no hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling


class Called:
    """From its making on, what it is given is called after each call of the function."""

    def __init__(self, owner: Any, name: str, called: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not is_compiling():
                called(*args, **kwargs)
            return result

        self._owner, self._name, self._original, self._ours = owner, name, original, function
        setattr(owner, name, function)

    def take_off(self) -> None:
        """Give torch its function back, unless another one has taken the place of ours."""
        if getattr(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self._original)
