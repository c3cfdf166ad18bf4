"""A program without a line of ours: its run begins with its first step, and not before."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import SGD, Optimizer

import otel_ddp
from conftest import Here
from loops import totals
from otel_ddp.integrations import launch
from otel_ddp.torch import discovery
from otel_ddp.torch.hooks.called import ignore_training
from otel_ddp.vocabulary import catalog

INPUT = torch.ones(8, 4)
STEPS = 14
BACKWARD, MAKE, MODE = torch.autograd.backward, Optimizer.__init__, nn.Module.train


@pytest.fixture(autouse=True)
def _waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after the import of torch below `otel-ddp run`; nothing of ours is left on torch."""
    torch._dynamo.reset()
    # Earlier tests of this process have opened runs.
    monkeypatch.setattr("otel_ddp.run.current_run._watched", set())
    launch.wait_for_training()
    yield
    ignore_training()
    discovery.detach()
    otel_ddp.finish()
    assert not _has_any_global_hook()
    assert (torch.autograd.backward, Optimizer.__init__, nn.Module.train) == (BACKWARD, MAKE, MODE)
    callbacks = sys.modules["torch._dynamo.callback"].callback_handler
    assert callbacks.start_callbacks == callbacks.end_callbacks == []


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def step(model: Callable[[torch.Tensor], torch.Tensor], optimizer: SGD) -> None:
    model(INPUT).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, steps: int = STEPS) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, optimizer)


def test_a_loop_is_measured_from_its_first_step_as_if_it_had_a_line(place: Here) -> None:
    train(net())
    otel_ddp.finish()
    model = net()
    otel_ddp.instrument(model)
    train(model)
    otel_ddp.finish()

    for journal in place.read():
        assert journal.total(catalog.TRAINING_STEPS) == STEPS
        assert journal.total(catalog.TRAINING_MICRO_BATCHES) == STEPS
        assert journal.total(catalog.TRAINING_SAMPLES) == 8 * STEPS
        assert journal.facts["model"] == "Sequential"
    assert len(place.journals()) == 2


def test_a_program_that_does_not_train_has_no_run_and_pays_for_no_hook(place: Here) -> None:
    model = net()
    # Before there is an optimizer even this is no training.
    model(INPUT)
    assert not _has_any_global_hook()
    SGD(model.parameters(), lr=0.01)
    assert inspect.signature(Optimizer.__init__) == inspect.signature(MAKE)
    with torch.no_grad():
        model(INPUT)
    model.eval()
    model(INPUT)

    assert otel_ddp.current() is None
    assert place.journals() == []


def test_a_model_that_trains_in_evaluation_mode_is_to_be_named(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    train(net().eval())
    otel_ddp.finish()

    assert place.only().total(catalog.TRAINING_STEPS) == 0
    assert caplog.text.count("name the model by otel_ddp.instrument(model)") == 1


@pytest.mark.parametrize("how", ["before the optimizer", "after it", "wrapped"])
def test_a_model_is_compiled_once_and_measured(place: Here, how: str) -> None:
    model, backend = net(), CompileCounter()
    if how == "before the optimizer":
        model.compile(backend=backend)
    optimizer = SGD(model.parameters(), lr=0.01)
    if how == "after it":
        model.compile(backend=backend)
    called = torch.compile(model, backend=backend) if how == "wrapped" else model
    for _ in range(STEPS):
        step(called, optimizer)

    assert backend.frame_count == 1
    assert totals(place)["training.steps"] == STEPS


# -- a program that has lines of ours


@pytest.mark.parametrize("where", ["before the optimizer", "after it", "after a first call"])
def test_the_line_of_a_program_wins(place: Here, where: str) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model, other = net(), net()
    if where == "before the optimizer":
        otel_ddp.instrument(model, group="mine")
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.01)
    if where == "after a first call":
        model(INPUT)
    if where != "before the optimizer":
        otel_ddp.instrument(model, group="mine", config={"lr": 0.01})
    for _ in range(STEPS):
        step(lambda value: model(value) + other(value), optimizer)
    # The other one is not looked for.
    assert not any(other._forward_hooks)
    otel_ddp.finish()

    journal = place.only()
    assert journal.identity["group"] == "mine"
    assert journal.config == ({} if where == "before the optimizer" else {"lr": 0.01})
    # Also where the run comes before the optimizer, and what waits for a training is in place.
    assert journal.steps_of("loss") == [*range(2, STEPS + 1)]
    assert totals(place)["training.steps"] == STEPS


def test_the_steps_of_a_program_that_has_opened_its_run_are_in_that_run(place: Here) -> None:
    run = otel_ddp.init(group="mine")
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        step(model, optimizer)
        run.log({"loss": 1.0})

    journal = place.only()
    assert (journal.identity["group"], journal.values["loss"]) == ("mine", 1.0)
    assert totals(place)["training.steps"] == STEPS


def test_a_program_that_has_finished_its_run_gets_no_second_one(place: Here) -> None:
    otel_ddp.init(group="mine")
    otel_ddp.finish()
    train(net())

    assert place.only().identity["group"] == "mine"


def test_what_a_program_has_taken_off_is_not_put_on_again(place: Here) -> None:
    model = net()
    otel_ddp.instrument(model)
    otel_ddp.uninstrument()
    train(model)
    otel_ddp.finish()

    assert place.only().total(catalog.TRAINING_STEPS) == 0


# -- what is wrong is no error of the program's


def test_a_mistake_in_a_variable_is_one_line_and_no_error(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_STRATEGY"] = "mian"

    train(net())

    (record,) = caplog.records
    assert record.getMessage().startswith("Nothing is recorded of this program: ")
    assert "mian" in record.getMessage()
    assert place.journals() == []
