"""Times waits for batches, from torch's DataLoader and from iterables passed to `data`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import dataloader

from otel_ddp.torch.hooks.called import Called
from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None
_next: Called | None = None


def attach(stepper: Stepper) -> None:
    """Time the iterator of torch's DataLoader, which has no hook.

    The iterator class's `__next__` is wrapped. Wrapping the iterator itself would change its type,
    which programs may check.
    """
    global _stepper, _next
    _stepper = stepper
    if _next is None:
        iterator = dataloader._BaseDataLoaderIter
        _next = Called(iterator, "__next__", _ended, begins=_began)


def detach() -> None:
    """Restore torch's method."""
    global _stepper, _next
    _stepper = None
    if _next is not None:
        _next.take_off()
        _next = None


def _began(*_: Any) -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive and stepper.measured:
        stepper.act("a batch began", stepper.load_began)


def _ended(*_: Any) -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive and stepper.measured:
        stepper.act("a batch ended", stepper.load_ended)


def timed(loader: Any) -> Any:
    """A proxy of an iterable, which times the waits for its items."""
    return _timed_type(*(hasattr(type(loader), name) for name in _SPECIAL))(loader)


# Python looks up special methods on the type, so the proxy's type must have the same ones as the
# iterable's. Each combination of these methods has its own proxy type.
_SPECIAL = ("__next__", "__len__", "__getitem__", "__contains__")


class _Timed:
    # An unusual name, so that this slot hides no attribute of the loader.
    __slots__ = ("__weakref__", "_otel_ddp_wrapped")

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_otel_ddp_wrapped", loader)

    def __iter__(self) -> Iterator[Any]:
        # Call `iter` now rather than at the first `next`: torch's loader draws a random number and
        # starts its workers in it.
        loader = _inside(self)
        iterator = _waited(lambda: iter(loader))
        return self if iterator is loader else timed(iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(_inside(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_inside(self), name, value)

    def __reduce__(self) -> Any:
        return (timed, (_inside(self),))


@functools.cache
def _timed_type(*has: bool) -> type[_Timed]:
    ways: list[Callable[..., Any]] = [
        lambda self: _waited(lambda: next(_inside(self))),
        lambda self: len(_inside(self)),
        lambda self, key: _inside(self)[key],
        lambda self, value: value in _inside(self),
    ]
    named = zip(_SPECIAL, ways, has, strict=True)
    return type("Timed", (_Timed,), {"__slots__": (), **{n: way for n, way, own in named if own}})


def _waited(fetch: Callable[[], Any]) -> Any:
    _began()
    try:
        return fetch()
    finally:
        _ended()


def _inside(wrapper: Any) -> Any:
    return object.__getattribute__(wrapper, "_otel_ddp_wrapped")
