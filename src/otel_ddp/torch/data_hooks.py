"""Waiting for data: torch's own loader by itself, any other iterable through `data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader

from otel_ddp import containment
from otel_ddp.torch.stepper import Stepper

_stepper: Stepper | None = None
_original: Any = None


def attach(stepper: Stepper) -> None:
    """Time the loader's iterator.

    torch has no hook here, so this is the one function of torch's that we stand in for: replacing
    the iterator would change its type, and asking users to wrap theirs is `data`.
    """
    global _stepper, _original
    _stepper = stepper
    if _original is None:
        _original = dataloader._BaseDataLoaderIter.__next__
        dataloader._BaseDataLoaderIter.__next__ = _next


def detach() -> None:
    """Give torch its function back."""
    global _stepper, _original
    _stepper = None
    if _original is not None and dataloader._BaseDataLoaderIter.__next__ is _next:
        dataloader._BaseDataLoaderIter.__next__ = _original
        _original = None


def _next(iterator: Any) -> Any:
    _began()
    try:
        return _original(iterator)
    finally:
        _ended()


def _began() -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive:
        try:
            stepper.data_began()
        except containment.ANYTHING:
            stepper.failed("before the data")


def _ended() -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive:
        try:
            stepper.data_ended()
        except containment.ANYTHING:
            stepper.failed("after the data")


class Timed:
    """An iterable whose waits are measured; in everything else it is what it wraps."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        while True:
            _began()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                _ended()
            yield batch

    def __next__(self) -> Any:
        # Of a loader that is an iterator itself.
        _began()
        try:
            return next(self._loader)
        finally:
            _ended()

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._loader, name)
