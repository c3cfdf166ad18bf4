"""The model that a run describes is the one inside all wrappers, and no part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import otel_ddp
from conftest import Here


class Net(nn.Module):
    """Has a part that is called as wrappers call what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.module(inputs))


class Own(DistributedDataParallel):
    """A subclass of a wrapper is one."""


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        *(DistributedDataParallel, Own, DataParallel, AveragedModel, compiled),
        lambda x: compiled(DistributedDataParallel(x)),
        lambda x: DistributedDataParallel(compiled(x)),
    ],
)
def test_the_model_inside_its_wrappers_is_described(place: Here, alone: None, wrap: Any) -> None:
    with otel_ddp.init() as run:
        run.describe(wrap(Net()))

    assert place.only().facts["model"] == "Net"
