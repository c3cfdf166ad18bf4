"""Training loops, and what a journal says of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import otel_ddp
from conftest import Journal
from measured import Slow as SlowByClock
from otel_ddp.journal.place import Place

PAUSE_S = 0.02


class _Sleeps:
    def spend(self, pauses: int) -> None:
        time.sleep(pauses * PAUSE_S)


class Slow(SlowByClock):
    """Takes PAUSE_S in forward and twice that in backward."""

    def __init__(self) -> None:
        super().__init__(_Sleeps())


INPUT = torch.ones(8, 4)


def watched(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.SGD]:
    """A model with our hooks, one layer by default, and the optimizer that trains it."""
    model = nn.Linear(4, 1) if model is None else model
    otel_ddp.instrument(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Callable[..., Any], optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUT).sum().backward()
        optimizer.step()


def totals(place: Place, tell: bool = True) -> dict[str, float]:
    """Every total of the one journal: name, or name/phase, told up to now."""
    (path,) = place.journals()
    opened = otel_ddp.current()
    if tell and opened is not None and opened._records is not None:
        opened._records.progress.flush()
    return Journal(path).totals


def phase(place: Place, name: str) -> float:
    return totals(place).get(f"training.phase.time/{name}/host", 0.0)


def in_a_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
