"""Samples a step now and then: our own hooks are timed in it, and more is read than in others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.steps import Work
from otel_ddp.torch.steps.watched_model import WatchedModel

_FAILURES_ALLOWED = 3
_NEVER = 2**63
# A flush is looked for at every so many events of a kind, for where no step ends.
OFTEN = 16


class StepListener:
    """What a stepper calls now and then, not in every step. Each of these does nothing."""

    def first_step_began(self) -> None:
        """The first step begins."""

    def forward_began(
        self, watched: WatchedModel, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """A training forward of a model whose FLOPs are not known begins."""

    def forward_ended(self, watched: WatchedModel, module: torch.nn.Module, output: Any) -> None:
        """That forward has ended; *output* is None where it raised."""

    def backward_began(self) -> None:
        """A backward has begun, since a forward that has returned no loss."""

    def forward_interrupted(self) -> None:
        """A forward has ended without its hook, as Ctrl-C makes it."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """In a sampled step: the optimizer is about to change the weights."""

    def step_ended(self) -> None:
        """A step has ended: one that was sampled, or one after which totals were written."""

    def no_step_ended(self) -> None:
        """There were very many backwards, and no step."""

    def counted_step_begins(self) -> None:
        """The next step is one in which collectives are counted."""

    def hook_called(self, phase: str) -> None:
        """In such a step: a hook was called, in this phase."""

    def counted_step_ended(self) -> None:
        """Such a step has ended."""


class SampledSteps:
    """Chooses the steps that are sampled, and those in which collectives are counted."""

    __slots__ = (
        *("_count_at", "_every", "_failures", "_within_s", "_work", "counting", "listener"),
        *("_after_step", "next_change", "sampling", "wants_backward", "wants_loss"),
    )

    def __init__(self, work: Work) -> None:
        self._work = work
        self._failures: dict[str, int] = {}
        self._within_s = 0.0  # what `run` has timed, also inside hooks
        self.listener = StepListener()
        self._every = 100
        self._count_at = -1
        self.sampling = self.counting = False
        """What the present step is."""
        self.wants_loss = False
        """Whether the listener is told of the next forward, for its loss."""
        self.wants_backward = False
        """Whether it is told of the next backward: that forward has returned no loss."""
        self._after_step: Callable[[], None] | None = None
        self.next_change = 0
        """The step at whose begin hooks may have to be wrapped anew."""

    def sample_every(self, every: int) -> None:
        """Sample one step of so many; 0: none."""
        self._every = every
        self.next_change = 0

    def count_in(self, step: int) -> None:
        """Count collectives in this step, once."""
        self._count_at = step
        self.next_change = 0

    def call_after_steps(self, act: Callable[[], None] | None) -> None:
        """Call this after each step from now on; None: no more. Any thread may say so."""
        self._after_step = act
        # Last: `begin` sets it, and then looks whether there is something to call.
        self.next_change = 0

    def begin(self, following: int) -> None:
        """The step of this number begins."""
        counting = following == self._count_at
        if self.counting:
            self.notify("counted_step_ended")
        if counting:
            self.notify("counted_step_begins")
        every = self._every
        self.sampling = every > 0 and following % every == 0
        self.counting = counting
        self.next_change = following + 1
        if not self.sampling and not counting:
            coming = [following + every - following % every] if every > 0 else []
            coming += [self._count_at] if self._count_at > following else []
            self.next_change = min(coming, default=_NEVER)
        if (act := self._after_step) is not None:
            self.next_change = following + 1
            self.run("profile", act)

    def wrap(self, hook: Callable[..., Any], phase: Callable[[], str]) -> Callable[..., Any]:
        """The hook as the present step needs it."""
        if self.sampling:
            hook = self._timed(hook)
        return self._counted(hook, phase) if self.counting else hook

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        # The hooks of one step stand for those of all until the next one that is sampled.
        work, every = self._work, self._every

        def timed(*args: Any) -> Any:
            began, within_s = time.perf_counter(), self._within_s
            try:
                return hook(*args)
            finally:
                took_s = time.perf_counter() - began - (self._within_s - within_s)
                work.hook_s += took_s * every

        return timed

    def _counted(self, hook: Callable[..., Any], phase: Callable[[], str]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.notify("hook_called", phase())
            return hook(*args)

        return counted

    def notify(self, event: str, *args: Any) -> None:
        """Call this method of the listener."""
        self.run(event, getattr(self.listener, event), *args)

    def run(self, name: str, act: Callable[..., None], *args: Any) -> None:
        """Do what is not done in every step, and charge it with the time that it takes by itself.

        What has failed three times is not done any more; the steps are measured as before.
        """
        failures = self._failures.get(name, 0)
        if failures >= _FAILURES_ALLOWED:
            return
        began = time.perf_counter()
        try:
            act(*args)
        except errors.ANY_ERROR:
            errors.record_failure(name)
            self._failures[name] = failures + 1
        took_s = time.perf_counter() - began
        self._work.hook_s += took_s
        self._within_s += took_s
