"""Waits for data: torch's loader, code that keeps or replaces its next, and what `data` wraps."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset, dataloader

import otel_ddp
from conftest import Here
from otel_ddp.vocabulary import catalog

PAUSE_S = 0.02
INPUT = torch.ones(8, 4)


def train(model: nn.Module, batches: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("end", [otel_ddp.uninstrument, otel_ddp.finish])
def test_code_that_kept_the_loaders_next_goes_on_loading_after_the_end(
    place: Here, end: Callable[[], None]
) -> None:
    original = dataloader._BaseDataLoaderIter.__next__
    otel_ddp.instrument(nn.Linear(4, 1))
    get_batch = iter(DataLoader(TensorDataset(INPUT), batch_size=2)).__next__
    get_batch()

    end()

    assert torch.equal(get_batch()[0], INPUT[:2])
    assert dataloader._BaseDataLoaderIter.__next__ is original


class Loader:
    """A user's own."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, self.epoch + 1])


def generated() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize("make", [generated, Loader, lambda: [1, 2], list, lambda: iter([1])])
def test_what_is_wrapped_can_do_no_more_and_no_less(make: Callable[[], Any]) -> None:
    plain, wrapped = make(), otel_ddp.data(make())

    assert bool(wrapped) is bool(plain)
    for kind in (Iterator, Sized):
        assert isinstance(wrapped, kind) is isinstance(plain, kind)
    for name in ("__len__", "__getitem__", "__next__", "__contains__"):
        assert hasattr(wrapped, name) is hasattr(plain, name)
    assert list(wrapped) == list(plain)


def test_a_copy_of_a_wrapper_wraps_a_copy() -> None:
    loader = Loader()
    wrapped = otel_ddp.data(loader)

    for made in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        other = made(wrapped)
        other.epoch = 7
        assert list(other) == [7, 8]
    assert loader.epoch == 0


def test_the_loaders_random_numbers_are_drawn_when_they_would_be() -> None:
    def drawn(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loader = wrap(DataLoader(TensorDataset(INPUT.cumsum(0)), shuffle=True))
        iterator = iter(loader)
        between = torch.rand(3)
        return [between, *(batch for (batch,) in iterator)]

    for with_us, without in zip(drawn(otel_ddp.data), drawn(lambda each: each), strict=True):
        assert torch.equal(with_us, without)


def test_what_a_loader_does_before_its_first_batch_is_data(place: Here) -> None:
    class Starting:
        def __iter__(self) -> Iterator[torch.Tensor]:
            time.sleep(PAUSE_S)
            return iter([INPUT, INPUT])

    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)

    train(model, otel_ddp.data(Starting()))
    otel_ddp.finish()

    journal = place.only()
    assert journal.total(catalog.TRAINING_STEPS) == 2
    assert journal.total(catalog.TRAINING_PHASE_TIME, phase="data", clock="host") >= PAUSE_S


def train_in_a_pool(model: nn.Module, loader: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    with ThreadPoolExecutor(1) as pool:
        for batch in loader:
            pool.submit(step, batch).result()


def fetched_ahead(wrap: Callable[[Any], Any]) -> Callable[[nn.Module, Any], None]:
    def trained(model: nn.Module, loader: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            batches = pool.submit(list, loader).result()
        train(model, wrap(batches))

    return trained


@pytest.mark.parametrize(
    ("trained", "reason"),
    [
        (train, ""),
        # The first batch comes before anybody knows which thread trains.
        (train_in_a_pool, "no_loader"),
        (fetched_ahead(iter), "no_loader"),
        (fetched_ahead(otel_ddp.data), ""),
    ],
    ids=["one thread", "trained in a pool", "fetched ahead", "fetched ahead, wrapped"],
)
def test_batches_that_another_thread_loads_are_reported_as_not_measured(
    place: Here, trained: Callable[[nn.Module, Any], None], reason: str
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)

    trained(model, DataLoader(INPUT, batch_size=2))  # type: ignore[arg-type]
    otel_ddp.finish()

    journal = place.only()
    assert journal.total(catalog.TRAINING_STEPS) == 4
    assert journal.facts["capability"]["data"] == reason
