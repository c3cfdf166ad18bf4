"""Learns of the calls of a function that has no hook, of torch's mostly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.compiler import is_compiling

# Functions of ours that are not needed any more. One stays in place as long as another is above it.
_taken_off: WeakSet[Callable[..., Any]] = WeakSet()


class Called:
    """Wraps a function: from now on each call of it is followed by one of *called*.

    *before*: *called* comes first, for a function that does not return.
    """

    def __init__(
        self, owner: Any, name: str, called: Callable[..., None], before: bool = False
    ) -> None:
        original = getattr(owner, name)
        # As its class has it: the lookup has taken off what binds a method of C++.
        kept = vars(owner)[name]

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if before and self._on:
                called(*args, **kwargs)
            result = original(*args, **kwargs)
            if not before and not is_compiling() and self._on:
                called(*args, **kwargs)
            return result

        # Where compiled code calls it outside of a graph, Dynamo would make a graph of this frame.
        if skip := getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None):
            skip(function.__code__)  # type: ignore[attr-defined]
        function.__wrapped__ = kept
        self._owner, self._name, self._ours, self._on = owner, name, function, True
        setattr(owner, name, function)

    def take_off(self) -> None:
        """Be silent, and give torch its function back unless another one has taken our place."""
        self._on = False
        _taken_off.add(self._ours)
        # Below ours may be another of ours, which was taken off before: a pool's worker has two.
        while (function := getattr(self._owner, self._name)) in _taken_off:
            setattr(self._owner, self._name, function.__wrapped__)


def backwards(called: Callable[..., None]) -> list[Called]:
    """Learns of each backward: of autograd, and of that which spans processes (RPC)."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        called = dynamo.disable(called)
    owners = (sys.modules.get(f"torch.{name}") for name in ("autograd", "distributed.autograd"))
    return [Called(each, "backward", called) for each in owners if hasattr(each, "backward")]
