"""Evaluations that hooks could miss: past DDP, and while something is compiled."""

from __future__ import annotations

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
