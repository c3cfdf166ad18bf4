"""A training measured by a clock of the test's own: phases take exactly what the test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from conftest import Journal
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.torch import measure
from otel_ddp.torch.steps.budget import Budget, in_sample


class Measured:
    """The journal of one process, and its clock, which stands still unless time is spent."""

    def __init__(self, directory: Path) -> None:
        writer = JournalWriter(directory, 512 * 1024, {})
        self.now_ns = writer.created_monotonic_ns
        self.recorder = Recorder(writer)
        self.progress = Progress(self.recorder, clock=lambda: self.now_ns)

    def spend(self, seconds: int) -> None:
        """Let so much time pass."""
        self.now_ns += seconds * 10**9

    def instrument(self, model: nn.Module) -> None:
        """Measure the steps of this model."""
        measure.start(model, self.progress, lambda _: None)

    def totals(self) -> dict[str, float]:
        """Each total by its name, and the seconds of each phase by its word."""
        self.progress.flush()
        phases = "training.phase.time/"
        return {
            name.removeprefix(phases).removesuffix("/host"): value
            for name, value in Journal(self.recorder.writer.path).totals.items()
        }

    def close(self) -> None:
        """Take the hooks off, and close the journal."""
        measure.stop(None)
        self.recorder.close()


class _Spends(Protocol):
    def spend(self, seconds: int, /) -> None: ...


class Slow(nn.Module):
    """Takes a second in forward and two in backward."""

    def __init__(self, measured: _Spends) -> None:
        super().__init__()
        self.measured = measured
        self.inner = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.measured.spend(1)
        return _SlowBackward.apply(self.inner(inputs), self.measured)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, measured: _Spends) -> torch.Tensor:
        ctx.measured = measured
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.measured.spend(2)
        return gradient, None


class OneOf(Budget):
    """One step in so many, whatever it costs."""

    def __init__(self, every: int) -> None:
        super().__init__(1.0)
        self._one_of = every
        self.affords = False

    @property
    def every(self) -> int:
        return self._one_of

    def step_ended(self, took_ns: float, measured: bool, steps: int = 1) -> None:
        pass

    def measures(self, number: int) -> bool:
        return in_sample(number, self.every)

    @property
    def allows(self) -> bool:
        return self.affords
