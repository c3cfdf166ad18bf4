"""A process that learns its rank after its run was opened: from hooks, and now and then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import otel_ddp
from conftest import Here
from loops import INPUT, train
from otel_ddp.torch import process_group


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a process group was asked; one that a test has made is taken down."""
    found: list[int] = []
    facts = process_group.facts

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return facts(*args, **kwargs)

    monkeypatch.setattr(process_group, "facts", counted)
    yield found
    dist.destroy_process_group()


def second_of_two() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)


def place_of(place: Here) -> tuple[Any, ...]:
    who = place.only().identity
    return who["global_rank"], who["world_size"], who["settled"]


def test_a_lone_process_that_joins_others_says_so_when_its_first_step_begins(
    place: Here, asked: list[int]
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    assert place_of(place) == (0, 1, True)

    second_of_two()
    loss = model(INPUT).sum()

    assert place_of(place) == (1, 2, True)
    loss.backward()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 30)
    assert asked == [1]


def test_a_process_that_only_logs_is_asked_every_few_seconds_and_not_at_each_value(
    place: Here, asked: list[int]
) -> None:
    run = otel_ddp.init()
    run.log({"loss": 1.0})
    second_of_two()
    for _ in range(3):
        run.log({"loss": 1.0})
    assert (place_of(place), asked) == ((0, 1, True), [])

    assert run._records is not None
    run._records.recorder.gate.check_due_ns = 0
    run.log({"loss": 1.0})

    assert (place_of(place), asked) == ((1, 2, True), [1])


def test_a_process_whose_variables_say_it_is_alone_stays_alone(
    place: Here, asked: list[int]
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.init(global_rank=0, world_size=1)
    otel_ddp.instrument(model)

    second_of_two()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)

    assert (place_of(place), asked) == ((0, 1, True), [])
