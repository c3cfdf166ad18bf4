"""To which phase the time of a step is charged, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import otel_ddp
from conftest import Here
from loops import INPUT, train
from measured import Measured, Slow


@pytest.fixture
def measured(place: Here) -> Iterator[Measured]:
    made = Measured(place.directory)
    yield made
    made.close()


@pytest.fixture
def model(measured: Measured) -> Slow:
    made = Slow(measured)
    measured.instrument(made)
    return made


@pytest.fixture
def optimizer(model: Slow) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def assert_seconds(measured: Measured, steps: int, **phases: float) -> None:
    """There were so many steps, and each of these phases took so long; no other one did."""
    found = measured.totals()
    words = ("data", "forward", "backward", "comm_wait", "optimizer", "eval", "checkpoint", "other")
    assert {word: found[word] for word in words if found.get(word)} == phases
    assert found.get("training.steps", 0.0) == steps


class Late(TensorDataset):
    """Takes a second for each item."""

    def __init__(self, measured: Measured) -> None:
        super().__init__(INPUT)
        self.measured = measured

    def __getitem__(self, index: int) -> Any:
        self.measured.spend(1)
        return super().__getitem__(index)


def test_the_phases_of_a_plain_loop_add_up(measured: Measured, model: Slow, optimizer: SGD) -> None:
    for _ in range(3):
        train(model, optimizer, 1)
        measured.spend(4)

    assert_seconds(measured, 3, forward=3, backward=6, other=12)
    assert measured.totals()["training.step.duration"] == 3 + 6 + 8


def test_time_in_a_loader_is_data(measured: Measured, model: Slow, optimizer: SGD) -> None:
    for (batch,) in DataLoader(Late(measured), batch_size=4):
        model(batch).sum().backward()
        optimizer.step()
    for batch in otel_ddp.data([INPUT, INPUT]):
        model(batch).sum().backward()
        optimizer.step()

    assert_seconds(measured, 4, data=8, forward=4, backward=8)


def test_evaluation_is_recognised_by_grad_mode_and_by_eval_mode(
    measured: Measured, model: Slow, place: Here
) -> None:
    before = place.only().state
    with torch.no_grad():
        model(INPUT)
    evaluated = place.only().state
    model.eval()
    model(INPUT)

    assert (before, evaluated) == ("starting", "running")
    assert_seconds(measured, 0, eval=2)


# What torch 2.4 says of its own code.
@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_computed_again_inside_backward(
    measured: Measured, reentrant: bool
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow = Slow(measured)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.slow, inputs, use_reentrant=reentrant)

    model = Checkpointed()
    measured.instrument(model)
    optimizer = SGD(model.parameters(), lr=0.1)

    for _ in range(2):
        model(INPUT.clone().requires_grad_()).sum().backward()
        optimizer.step()

    assert_seconds(measured, 2, forward=2, backward=6)


def test_a_model_that_trains_in_evaluation_mode_trains(
    measured: Measured, model: Slow, optimizer: SGD
) -> None:
    model.eval()
    train(model, optimizer, 1)  # after which that is known
    before = measured.totals()

    train(model, optimizer)

    found = measured.totals()
    assert found["training.steps"] == 4
    assert found["training.samples"] == 24
    assert found["forward"] == 3
    assert found["backward"] - before.get("backward", 0.0) == 6
    assert found["eval"] == before["eval"]


@pytest.mark.parametrize("backward", [False, True])
def test_an_evaluation_with_gradients_on_is_one(
    backward: bool, measured: Measured, model: Slow, optimizer: SGD
) -> None:
    """Nobody turned them off; or the inputs are attacked along their gradients."""
    for _ in range(3):
        train(model, optimizer, 1)
        model.eval()
        loss = model(INPUT).sum()
        if backward:
            loss.backward()
        model.train()

    found = measured.totals()
    assert found["training.steps"] == found["training.micro_batches"] == 3
    assert found["training.samples"] == 24
    assert (found["forward"], found["backward"], found["eval"]) == (3, 6, 3)


def test_an_evaluation_between_forward_and_backward_hides_neither(
    measured: Measured, model: Slow, optimizer: SGD
) -> None:
    for _ in range(3):
        loss = model(INPUT).sum()
        model.eval()
        model(INPUT)
        model.train()
        loss.backward()
        optimizer.step()

    assert_seconds(measured, 3, forward=3, backward=6, eval=3)
