"""Sizes of data sets, and the samples of an epoch, as torch's loader goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler

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
        self._told: dict[tuple[str, str], float] = {}

    @errors.contained()
    def batch_wanted(self, iterator: Any) -> None:
        """One of the first batches of a pass is asked for."""
        stepper, number = self._stepper, iterator._num_yielded
        if not stepper.alive:
            return
        if number == 0:
            self._tell_epoch()
            self._epoch = None
            self._passes[iterator] = _Pass(stepper.seen.forwards, stepper.progress.work.samples)
        elif number == LOOKED_AT - 1:
            self._tell_sizes(iterator)

    @errors.contained()
    def ended(self, iterator: Any) -> None:
        """The loader has no further batch."""
        before = self._passes.pop(iterator, None)
        if before is None or not self._stepper.alive:
            return
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

    def _tell_sizes(self, iterator: Any, trained: bool | None = None) -> None:
        if trained is None:
            before = self._passes.get(iterator)
            if before is None:
                return
            trained = self._stepper.seen.forwards > before.forwards
        split = "train" if trained else "eval"
        for metric, size in _sizes(iterator):
            # A length is the user's code.
            found = errors.attempt(size, None)
            if type(found) is int and found >= 0:
                self._stamp(metric, found, split=split)

    def _stamp(self, metric: catalog.Metric, value: int, **labels: str) -> None:
        key = metric.name, labels.get("split", "")
        if self._told.get(key) != value:
            self._told[key] = value
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
