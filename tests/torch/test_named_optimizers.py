"""`optimizer=` and `step_optimizer=` may be given what wraps an optimizer of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import otel_ddp
from conftest import Here
from otel_ddp import errors
from otel_ddp.vocabulary import catalog

INPUT = torch.ones(8, 4)


class Accelerated(Optimizer):
    """As accelerate's: an Optimizer by name, whose own hooks nobody calls."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class Light:
    """As lightning's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        self._optimizer.step()


class Ahead(Optimizer):
    """Steps of its own around another's, with hooks of their own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def train(model: nn.Module, first: Any, second: Any, steps: int = 4) -> None:
    for _ in range(steps):
        first.step()
        model(INPUT).sum().backward()
        second.step()


@pytest.mark.parametrize("wrap", [Accelerated, Light, lambda x: Light(Accelerated(x)), Ahead])
def test_a_wrapped_optimizer_ends_the_steps_it_is_named_for(place: Here, wrap: Any) -> None:
    model = nn.Linear(4, 1)
    first = SGD([model.bias], lr=0.1)
    second = wrap(SGD([model.weight], lr=0.1))
    otel_ddp.instrument(model, step_optimizer=second)

    train(model, first, second)
    otel_ddp.finish()

    assert place.only().total(catalog.TRAINING_STEPS) == 4
    assert place.only().total(catalog.TRAINING_MICRO_BATCHES) == 4


class Engine(nn.Module):
    """As DeepSpeed's: a model with its optimizer, which steps copies of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 1)
        copies = [each.detach().clone().requires_grad_() for each in self.module.parameters()]
        for each in copies:
            each.grad = torch.zeros_like(each)
        self.optimizer = Light(Light(SGD(copies, lr=0.1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)


@pytest.mark.parametrize("named", [True, False])
def test_an_engine_that_holds_its_optimizer_of_copies_is_measured(place: Here, named: bool) -> None:
    engine, another = Engine(), SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    otel_ddp.instrument(engine if named else None)

    for _ in range(3):
        engine(INPUT).sum().backward()
        engine.optimizer.step()
        another.step()
    otel_ddp.finish()

    assert place.only().total(catalog.TRAINING_STEPS) == 3
    assert place.only().total(catalog.TRAINING_PHASE_TIME, phase="optimizer") > 0


@pytest.mark.parametrize("name", ["optimizer", "step_optimizer"])
def test_what_wraps_no_optimizer_of_torch_gets_one_warning_and_training_goes_on(
    place: Here, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    class Broken:
        @property
        def optimizer(self) -> Any:
            raise ZeroDivisionError("the user's own")

    errors.raise_failures = False
    circle = Light(None)
    circle._optimizer = Light(circle)
    model = nn.Linear(4, 1)
    for given in (circle, [SGD(model.parameters(), lr=0.1)], Broken()):
        otel_ddp.instrument(model, **{name: given})
    said = list(caplog.messages)
    optimizer = SGD(model.parameters(), lr=0.1)

    for _ in range(3):
        model(INPUT).sum().backward()
        optimizer.step()
    otel_ddp.finish()

    (line,) = said
    assert line.startswith(f"{name}=Light: no torch.optim.Optimizer")
    assert place.only().total(catalog.TRAINING_STEPS) == 3


def test_what_is_no_scaler_gets_a_warning(place: Here, caplog: pytest.LogCaptureFixture) -> None:
    otel_ddp.instrument(nn.Linear(4, 1), scaler=3)

    assert caplog.messages == ["scaler=int has no update(): it is ignored."]
