"""Wraps functions that have no hooks, mostly torch's, to be notified of each call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.compiler import is_compiling
from torch.optim import Optimizer

from otel_ddp import errors

# Our wrappers that are switched off. One may have to stay in place, because another tool has
# wrapped it and still calls it.
_taken_off: WeakSet[Callable[..., Any]] = WeakSet()


class Called:
    """Wraps a function: *called* gets the arguments of each call, after the function has returned.

    *before*: call *called* before the function instead, for a function that does not return.
    *begins*: a second callable, called before the function; *called* then also runs if the function
    raises.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        called: Callable[..., None],
        before: bool = False,
        begins: Callable[..., None] | None = None,
    ) -> None:
        original = getattr(owner, name)
        # Restore this entry of the class later, not `original`: `getattr` unwraps a C++ method.
        descriptor = vars(owner)[name]
        first = called if before else begins

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if first is not None and self._on:
                first(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                if begins is not None and self._on:
                    called(*args, **kwargs)
                raise
            if not before and not is_compiling() and self._on:
                called(*args, **kwargs)
            return result

        # Exclude our wrapper from compilation: compiled code may call it outside of a graph.
        if skip := getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None):
            skip(function.__code__)  # type: ignore[attr-defined]
        function.__wrapped__ = descriptor
        self._owner, self._name, self._ours, self._on = owner, name, function, True
        setattr(owner, name, function)

    def take_off(self) -> None:
        """Switch the wrapper off; restore the function unless another tool has wrapped it since."""
        self._on = False
        _taken_off.add(self._ours)
        # Remove all wrappers that are off: this one may have wrapped others, as in a pool's worker.
        while (function := getattr(self._owner, self._name)) in _taken_off:
            setattr(self._owner, self._name, function.__wrapped__)


def backwards(called: Callable[..., None]) -> list[Called]:
    """Wrap the backward of autograd, and that of distributed autograd (RPC)."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        called = dynamo.disable(called)
    owners = (sys.modules.get(f"torch.{name}") for name in ("autograd", "distributed.autograd"))
    return [Called(each, "backward", called) for each in owners if hasattr(each, "backward")]


# -- the first sign of training: an optimizer is created, or a backward is called

_signs: list[Called] = []


def wait_for_training(act: Callable[[], None]) -> None:
    """Call *act* once, at the first sign of training.

    Until then only `Optimizer.__init__` and `backward` are wrapped.
    """
    ignore_training()

    @errors.contained()
    def begins(*_: Any, **__: Any) -> None:
        ignore_training()
        act()

    _signs.append(Called(Optimizer, "__init__", begins))
    _signs.extend(backwards(begins))


def ignore_training() -> None:
    """Stop waiting, and restore torch's functions."""
    for each in _signs:
        each.take_off()
    _signs.clear()
