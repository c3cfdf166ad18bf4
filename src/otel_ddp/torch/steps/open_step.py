"""The step that is open: what has begun in it, and what its hooks have seen so far."""

from __future__ import annotations

from collections.abc import Callable

import torch

from otel_ddp.recording.phases import Phase
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.steps.sampled import SampledSteps
from otel_ddp.torch.steps.step_end import StepEnd
from otel_ddp.torch.steps.watched_model import WatchedModel


class Seen:
    """What was seen at all. Capabilities are read off it."""

    __slots__ = (
        *("backwards", "closures", "compiled_steps", "compiles", "float16", "forwards", "loads"),
        *("loads_elsewhere", "steps"),
    )

    def __init__(self) -> None:
        self.forwards = self.backwards = self.steps = self.compiled_steps = self.loads = 0
        self.loads_elsewhere = self.closures = self.compiles = self.float16 = False


class Search:
    """The search for models, which follows what the hooks see. This one searches for none."""

    on = False

    def batch_wanted(self) -> None:
        """A loader is asked for a batch, and no model is known."""

    def compiling(self) -> None:
        """A graph is about to be compiled."""

    def model_stepped(self) -> None:
        """The optimizer of a watched model has made a step."""

    def model_not_called(self) -> None:
        """A step has ended, and no call of a watched model was seen."""

    def unknown_optimizer_came(self) -> None:
        """An optimizer trains no watched model."""

    def unknown_optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has made a step."""


class OpenStep:
    """Begins and ends steps; `end` decides what ends one."""

    __slots__ = (
        *("_progress", "_sampled", "_wrap_hooks", "batch_model", "closure", "end", "evaluated"),
        *("evaluated_has_gradient", "optimizer", "optimizing", "search", "seen"),
        "stepped_in_backward",
    )

    def __init__(
        self, progress: Progress, sampled: SampledSteps, wrap_hooks: Callable[[], None]
    ) -> None:
        """*wrap_hooks*: makes the hooks as the step that begins needs them."""
        self._progress, self._sampled, self._wrap_hooks = progress, sampled, wrap_hooks
        self.end = StepEnd()
        self.seen = Seen()
        self.search = Search()
        self.optimizer = progress.phases.of_hooks("optimizer")
        self.optimizing: int | None = None
        """The optimizer whose step is open, by its id."""
        self.closure = False
        """Whether that step was given a closure, which calls the model."""
        self.stepped_in_backward = False
        """Whether an optimizer has stepped inside the backward that is under way."""
        self.batch_model: WatchedModel | None = None
        """Of several models that were found rather than named: the one whose batch is the step's.
        """
        self.evaluated: WatchedModel | None = None
        """A model in evaluation mode that was called with gradients on."""
        self.evaluated_has_gradient = False
        """Whether such a gradient has arrived. Where a step follows, this model trains so."""

    def begin(self) -> None:
        """Work begins: of a new step, or more of the same."""
        # An optimizer that raised has not reported its end.
        if self.optimizing is not None:
            self.optimizing = None
            self.closure = False
            self._progress.phases.leave(self.optimizer)
        # Work begins again after a backward, and no optimizer made a step of it: more of the same
        # step, unless the scaler has seen to it that none was made.
        if self.end.scaler_skipped():
            self.finish(skipped=True)
        if self.end.compiled_stepped():
            self.seen.compiled_steps += 1
            self.finish()
        steps = self._progress.steps
        if not steps.in_step:
            if not steps.began:
                self._sampled.listener.first_step_began()
            self._progress.begin_step()

    def finish(self, skipped: bool = False, phase: Phase | None = None) -> None:
        """The step is over, and so is *phase*."""
        if self.evaluated is not None and self.evaluated_has_gradient:
            self.evaluated.trains_in_eval = True
        self.end.step_ended()
        self.batch_model = None
        self.seen.steps += 1
        progress, sampled = self._progress, self._sampled
        if progress.step_finished(skipped, phase) or sampled.sampling:
            sampled.run("flush", progress.flush)
            sampled.notify("step_ended")
        following = progress.steps.count + 1
        if following >= sampled.next_change:
            sampled.begin(following)
            self._wrap_hooks()
