"""Times the waits for data, and reads the sizes of data sets.

The waits are those of torch's own loader, and of iterables that `data` wraps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler, dataloader

from otel_ddp import errors
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.vocabulary import catalog

# By this batch of a pass the first ones have been trained on, if any are: loaders of frameworks
# fetch one or two ahead.
LOOKED_AT = 4
# torch's kind of a set that has a length and no order of its own.
_MAPS = 0


class _Pass(NamedTuple):
    """What was trained on before a pass through a set."""

    forwards: int
    samples: int


class DataSets:
    """One a stepper. Nothing of it is called within a step, but at its beginning."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        # Of the last epoch: a framework trains on its last batch after the loader's end.
        self._epoch: _Pass | None = None

    @errors.contained()
    def batch_wanted(self, iterator: Any) -> None:
        """One of the first batches of a pass is asked for."""
        stepper, number = self._stepper, iterator._num_yielded
        if not stepper.alive:
            return
        stepper.progress.settle()
        if number == 0:
            self._tell_epoch()
            self._epoch = None
            self._passes[iterator] = _Pass(stepper.seen.forwards, stepper.progress.work.samples)
        elif number == LOOKED_AT - 1 and (before := self._passes.get(iterator)) is not None:
            self._tell_sizes(iterator, stepper.seen.forwards > before.forwards)

    @errors.contained()
    def ended(self, iterator: Any) -> None:
        """The loader has no further batch."""
        before = self._passes.pop(iterator, None)
        if before is None or not self._stepper.alive:
            return
        self._stepper.progress.settle()
        trained = self._stepper.seen.forwards > before.forwards
        self._tell_sizes(iterator, trained)
        if trained:
            self._epoch = before
            self._tell_epoch()

    def _tell_epoch(self) -> None:
        # Ranks that share a batch count no samples.
        if self._epoch is not None:
            samples = self._stepper.progress.work.samples - self._epoch.samples
            if samples > 0:
                self._stamp(catalog.TRAINING_EPOCH_SAMPLES, samples)

    def _tell_sizes(self, iterator: Any, trained: bool) -> None:
        split = "train" if trained else "eval"
        for metric, size in _sizes(iterator):
            # A length is the user's code.
            found = errors.attempt(size, None)
            if type(found) is int and found >= 0:
                self._stamp(metric, found, split=split)

    def _stamp(self, metric: catalog.Metric, value: int, **labels: str) -> None:
        self._stepper.progress.recorder.totals.stamp(metric, float(value), **labels)


def _sizes(iterator: Any) -> Iterator[tuple[catalog.Metric, Callable[[], Any]]]:
    """What to ask for a size. torch asks the same when it draws the samples of an epoch."""
    if getattr(iterator, "_dataset_kind", None) != _MAPS:
        return
    batches = iterator._index_sampler
    yield catalog.TRAINING_SET_SIZE, lambda: len(iterator._dataset)
    if isinstance(batches, BatchSampler):
        yield catalog.TRAINING_SET_BATCHES, lambda: len(batches)
        yield catalog.TRAINING_SET_RANK_SAMPLES, lambda: _drawn(batches)


def _drawn(batches: BatchSampler) -> int:
    drawn = len(batches.sampler)
    return min(drawn, len(batches) * batches.batch_size) if batches.drop_last else drawn


_stepper: Stepper | None = None
_data_sets: DataSets | None = None
_replacement: Any = None


def attach(stepper: Stepper) -> None:
    """Time the loader's iterator.

    torch has no hook here, so this is the one function of torch's that we replace. Another iterator
    would be of another type; and where users can wrap their own, they have `data`.
    """
    global _stepper, _data_sets, _replacement
    _stepper, _data_sets = stepper, DataSets(stepper)
    if _replacement is None:
        _replacement = _timed_next(dataloader._BaseDataLoaderIter.__next__)
        dataloader._BaseDataLoaderIter.__next__ = _replacement


def detach() -> None:
    """Give torch its function back."""
    global _stepper, _data_sets, _replacement
    _stepper = _data_sets = None
    ours = _replacement
    if ours is not None and dataloader._BaseDataLoaderIter.__next__ is ours:
        dataloader._BaseDataLoaderIter.__next__ = ours.__wrapped__
        _replacement = None


def _timed_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # It holds the function that it replaces: code that has kept it, or is in the middle of it,
    # needs that one after `detach` too.
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        data_sets = _data_sets
        # Of a pass through a set only the first batches are looked at, and its end.
        if data_sets is not None and getattr(iterator, "_num_yielded", LOOKED_AT) < LOOKED_AT:
            data_sets.batch_wanted(iterator)
        _began()
        try:
            return original(iterator)
        except StopIteration:
            if data_sets is not None:
                data_sets.ended(iterator)
            raise
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
