"""Our hooks on modules: none is left behind, and copies of modules work."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import otel_ddp
from conftest import Here, Journal
from otel_ddp import errors
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.vocabulary import catalog

INPUT = torch.ones(8, 4)


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(INPUT).sum().backward()
        optimizer.step()


def hooks(module: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    more = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return sum(len(getattr(module, kind)) for kind in (*kinds, *more))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrapper_left_in_evaluation_mode_trains_as_its_model_does(
    place: Here, alone: None, compiled: bool
) -> None:
    """As who sets the modes of the model alone leaves it."""
    inner = nn.Linear(4, 1)
    model: nn.Module = DistributedDataParallel(inner)
    model = torch.compile(model, backend="eager") if compiled else model
    model.eval()
    inner.train()
    otel_ddp.instrument(model)

    train(model, 3)
    otel_ddp.finish()

    journal = place.only()
    assert journal.total(catalog.TRAINING_MICRO_BATCHES) == 3
    assert journal.total(catalog.TRAINING_SAMPLES) == 24


def test_a_module_that_is_wrapped_again_and_again_has_one_hook(place: Here, alone: None) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for _ in range(5):
        model = DistributedDataParallel(inner)
        otel_ddp.instrument(model)
        train(model)
        # Dropped and collected, so that the next one may well lie in its place.
        del model
        gc.collect()

    assert hooks(inner) == 1
    otel_ddp.uninstrument()
    assert hooks(inner) == 0
    otel_ddp.finish()
    assert place.only().total(catalog.TRAINING_STEPS) == 5


def test_an_output_that_is_the_same_each_time_gets_one_hook(place: Here) -> None:
    weights = torch.ones(4, requires_grad=True)
    kept = weights * 2
    model = nn.Identity()
    otel_ddp.instrument(model)
    calls: list[Any] = []
    stepper = model_hooks._stepper
    assert stepper is not None
    for _ in range(50):
        output = model(kept)
    # Each hook that the node has is called at its gradient.
    hook = stepper.backward_hook.hook
    stepper.backward_hook.call(lambda gradient: (calls.append(1), hook(gradient))[1])
    output.sum().backward()
    for _ in range(3):
        model(weights * 3).sum().backward()

    assert len(calls) == 4
    otel_ddp.finish()
    assert place.only().total(catalog.TRAINING_MICRO_BATCHES) == 4


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_scripted_model_gets_a_warning_and_no_hooks(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    errors.raise_failures = False
    model = torch.jit.script(nn.Linear(4, 1))

    otel_ddp.instrument(model)
    otel_ddp.instrument(model).log({"loss": 1.0})
    train(model)

    (said,) = caplog.records
    assert "RecursiveScriptModule" in said.getMessage()
    assert said.exc_info is None
    assert place.only().points == [("loss", 1.0)]


def test_a_graph_of_an_earlier_run_is_of_no_later_one(place: Here) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    train(model)
    older = model(INPUT).sum()
    otel_ddp.finish()
    earlier = set(place.journals())
    otel_ddp.instrument(model)

    train(model, 3)
    older.backward()
    otel_ddp.finish()

    (path,) = set(place.journals()) - earlier
    totals = {each.metric: each.values[0] for each in Journal(path).all_totals}
    assert totals["training.micro_batches"] == 3


def test_a_scaler_is_freed_once_the_run_is_over(place: Here) -> None:
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu")
    optimizer = SGD(model.parameters(), lr=0.01)
    otel_ddp.instrument(model, scaler=scaler)
    scaler.scale(model(INPUT).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    otel_ddp.finish()

    held = ref(scaler)
    del scaler
    gc.collect()

    assert held() is None


def test_a_model_that_is_gone_is_not_kept_by_hooks_of_its_own(place: Here, alone: None) -> None:
    class Bound(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.register_forward_pre_hook(self.look)

        def look(self, *_: Any) -> None:
            pass

    ddp = DistributedDataParallel(Bound())
    inner = ref(ddp.module)
    otel_ddp.instrument(ddp)
    train(ddp, 6)
    del ddp
    gc.collect()
    assert inner() is None

    # One without DDP comes after it.
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    train(model, 6)
    otel_ddp.finish()
    assert place.only().total(catalog.TRAINING_STEPS) == 12
