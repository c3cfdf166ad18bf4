"""Times the waits for data: those of torch's own loader, and of iterables that `data` wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import dataloader

from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None
_replacement: Any = None


def attach(stepper: Stepper) -> None:
    """Time the loader's iterator.

    torch has no hook here, so this is the one function of torch's that we replace. Another iterator
    would be of another type; and where users can wrap their own, they have `data`.
    """
    global _stepper, _replacement
    _stepper = stepper
    if _replacement is None:
        _replacement = _timed_next(dataloader._BaseDataLoaderIter.__next__)
        dataloader._BaseDataLoaderIter.__next__ = _replacement


def detach() -> None:
    """Give torch its function back."""
    global _stepper, _replacement
    _stepper = None
    ours = _replacement
    if ours is not None and dataloader._BaseDataLoaderIter.__next__ is ours:
        dataloader._BaseDataLoaderIter.__next__ = ours.__wrapped__
        _replacement = None


def _timed_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # It holds the function that it replaces: code that has kept it, or is in the middle of it,
    # needs that one after `detach` too.
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        _began()
        try:
            return original(iterator)
        finally:
            _ended()

    return next_batch


def _began() -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive and stepper.measured:
        stepper.act("a batch began", stepper.load_began)


def _ended() -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive and stepper.measured:
        stepper.act("a batch ended", stepper.load_ended)


def timed(loader: Any) -> Any:
    """An iterable whose waits are measured; in all else it behaves as what it wraps."""
    return _timed_type(*(hasattr(type(loader), name) for name in _SPECIAL))(loader)


# What the interpreter looks up on types, not on objects: each kind of iterable gets a type of ours
# with just the ones that it has.
_SPECIAL = ("__next__", "__len__", "__getitem__", "__contains__")


class _Timed:
    # A name that no loader has.
    __slots__ = ("__weakref__", "_otel_ddp_wrapped")

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_otel_ddp_wrapped", loader)

    def __iter__(self) -> Iterator[Any]:
        # Not lazily: here torch's loader draws a random number and starts its workers.
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
