"""Sizes of data sets and the samples of an epoch, as torch's loader goes through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import otel_ddp
from conftest import Here, Journal
from otel_ddp.vocabulary import catalog

SIZES = ("training.set.size", "training.set.batches", "training.set.rank_samples")


class Loop:
    """A model that is trained, and may be evaluated."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        otel_ddp.instrument(self.model)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch[0]).sum().backward()
        self.optimizer.step()

    def evaluate(self, loader: DataLoader[Any]) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in loader:
                self.model(batch[0])
        self.model.train()


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.ones(count, 4))


def told(place: Here, split: str) -> tuple[float | None, ...]:
    otel_ddp.finish()
    journal = place.only()
    return tuple(total(journal, name, split=split) for name in SIZES)


def total(journal: Journal, name: str, **labels: str) -> float | None:
    """A total; None where there is none."""
    found = journal.total(catalog.BY_NAME[name], **labels)
    return found if any(each.metric == name for each in journal.all_totals) else None


def test_a_rank_tells_the_size_of_the_set_and_its_part_of_it(place: Here) -> None:
    loop, data = Loop(), samples(103)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=4, rank=1)

    for batch in DataLoader(data, batch_size=8, sampler=sampler):
        loop.step(batch)

    # 103 samples among four ranks are 26 each, with one that comes twice.
    assert told(place, "train") == (103, 4, 26)


def test_a_long_epoch_has_its_sizes_after_the_first_batches(place: Here) -> None:
    loop = Loop()
    batches = iter(DataLoader(samples(80), batch_size=8))

    for _ in range(4):
        loop.step(next(batches))

    assert told(place, "train") == (80, 10, 80)
    assert total(place.only(), "training.epoch.samples") is None


def test_a_loader_without_steps_is_an_evaluation(place: Here) -> None:
    loop = Loop()
    evaluation = DataLoader(samples(9), batch_size=3)

    loop.evaluate(evaluation)
    for batch in DataLoader(samples(26), batch_size=8):
        loop.step(batch)
        loop.evaluate(evaluation)

    assert told(place, "eval") == (9, 3, 9)
    journal = place.only()
    assert total(journal, "training.set.size", split="train") == 26
    assert total(journal, "training.epoch.samples") == 26


def test_the_last_batch_counts_where_a_framework_fetches_one_ahead(place: Here) -> None:
    loop = Loop()
    for _ in range(2):
        iterator = iter(DataLoader(samples(26), batch_size=8))
        ahead = next(iterator)
        for following in iterator:
            loop.step(ahead)
            ahead = following
        loop.step(ahead)
    list(DataLoader(samples(3)))

    otel_ddp.finish()
    assert total(place.only(), "training.epoch.samples") == 26


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """Of no length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return iter([(torch.ones(4),)] * 10)


def test_a_stream_has_no_size_and_its_epoch_has_samples(place: Here) -> None:
    loop = Loop()

    for batch in DataLoader(Stream(), batch_size=2):
        loop.step(batch)

    assert told(place, "train") == (None, None, None)
    assert total(place.only(), "training.epoch.samples") == 10


class Angry(TensorDataset):
    """Its length is told as long as it likes."""

    angry = False

    def __len__(self) -> int:
        if self.angry:
            raise RuntimeError("asked too often")
        return 8


def test_a_set_that_raises_over_its_length_costs_its_size_alone(place: Here) -> None:
    loop, data = Loop(), Angry(torch.ones(8, 4))
    batches = iter(DataLoader(data, batch_size=4))

    loop.step(next(batches))
    loop.step(next(batches))
    data.angry = True
    assert next(batches, None) is None

    assert told(place, "train") == (None, None, None)
    assert total(place.only(), "training.epoch.samples") == 8
