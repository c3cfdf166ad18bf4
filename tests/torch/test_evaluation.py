"""Evaluations that hooks could miss: past DDP, and while something is compiled."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import otel_ddp
from conftest import Here
from loops import INPUT, PAUSE_S, Slow, phase, totals, train
from otel_ddp.torch.hooks import model as model_hooks

pytestmark = pytest.mark.timed


class SlowWithBuffers(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))


@pytest.mark.parametrize("make", [Slow, SlowWithBuffers])
def test_the_module_inside_of_ddp_called_without_gradients_is_an_evaluation(
    place: Here, alone: None, make: type[Slow]
) -> None:
    model = DistributedDataParallel(make())
    optimizer = SGD(model.parameters(), lr=0.01)
    otel_ddp.instrument(model)
    for _ in range(2):
        train(model, optimizer, 2)
        with torch.no_grad():
            model.module(INPUT)
            model(INPUT)

    found = totals(place)
    # Two past DDP, and two by it.
    assert found["training.phase.time/eval/host"] >= 4 * PAUSE_S
    assert found["training.phase.time/forward/host"] >= 4 * PAUSE_S
    assert found["training.steps"] == found["training.micro_batches"] == 4
    assert found["training.samples"] == 32


def test_an_evaluation_past_ddp_that_raises_leaves_the_next_one_and_training_as_they_are(
    place: Here, alone: None
) -> None:
    class Fails(nn.Linear):
        fails = False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.fails:
                # Torch comes to this one after ours.
                self.register_forward_hook(lambda *_: None, always_call=True)
                raise LookupError("the user's own")
            return super().forward(inputs)

    model = DistributedDataParallel(Fails(4, 1))
    optimizer = SGD(model.parameters(), lr=0.01)
    otel_ddp.instrument(model)
    model.module.fails = True
    with torch.no_grad(), pytest.raises(LookupError, match="the user's own"):
        model.module(INPUT)
    model.module.fails = False
    evaluated_s = phase(place, "eval")
    train(model, optimizer, 3)
    assert phase(place, "eval") == evaluated_s

    with torch.no_grad():
        copy.deepcopy(model.module)(INPUT)
        model.module(INPUT)
    otel_ddp.uninstrument()

    assert totals(place)["training.micro_batches"] == 3
    names = (model_hooks.__name__,)
    left = [*model.module._forward_hooks.values(), *model.module._forward_pre_hooks.values()]
    assert [each for each in left if each.__module__ in names] == []


@pytest.mark.parametrize("trained", [False, True])
def test_compiling_in_an_evaluation_is_compiling(place: Here, trained: bool) -> None:
    torch._dynamo.reset()

    def backend(graph: Any, _: Any) -> Any:
        time.sleep(20 * PAUSE_S)
        return graph.forward

    inner = nn.Linear(4, 1)
    model = torch.compile(inner, backend=backend)
    otel_ddp.instrument(model)
    if trained:
        train(model, SGD(inner.parameters(), lr=0.01), 2)
    before = phase(place, "compile")

    with torch.no_grad():
        model(INPUT)

    assert phase(place, "compile") - before >= 20 * PAUSE_S
    assert phase(place, "eval") > 0
