"""Starts and stops the measurement of training steps: one stepper per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from otel_ddp import errors
from otel_ddp.recording.progress import Progress
from otel_ddp.torch import discovery, models, stack_answers
from otel_ddp.torch.hooks import data as data_hooks
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.hooks import runtime
from otel_ddp.torch.hooks.called import Called, ignore_training
from otel_ddp.torch.profile_window import ProfileWindow
from otel_ddp.torch.readings.between_steps import Readings
from otel_ddp.torch.steps.stepper import Stepper


class _Measuring:
    """The objects that measure the steps of one `Progress`."""

    def __init__(self, progress: Progress) -> None:
        self.stepper = Stepper(progress)
        self.readings = Readings(self.stepper)
        self.window = ProfileWindow(progress, self.stepper.sampled)
        self.stepper.switch_hooks = self._switch
        # Wrapped in unmeasured steps, too: evaluations inside of those are measured.
        self.evaluates = Called(nn.Module, "eval", self._evaluates)
        # Each function of `os` that replaces the program, such as `execlp`, calls one of these two.
        self.replaces = [Called(os, each, _replaced, before=True) for each in ("execv", "execve")]

    def _switch(self, on: bool) -> None:
        model_hooks.switch(on)
        # Leave these hooks on after a compilation: a compiled optimizer step has guards on them.
        if on or not self.stepper.compiles:
            optimizer_hooks.switch(on)

    @errors.contained()
    def _evaluates(self, module: nn.Module) -> None:
        if not self.stepper.measured and model_hooks.is_in_watched(module):
            self.stepper.evaluates()


_current: _Measuring | None = None


@errors.contained()
def _replaced(*_: Any) -> None:
    """Another program is about to replace this one: flush, or unwritten records are lost."""
    # A forked child, where `_current` is None, must not flush: the journal is its parent's.
    if (current := _current) is not None:
        current.stepper.progress.flush()


def start(
    model: nn.Module | None,
    progress: Progress,
    found: Callable[[nn.Module], None],
    **options: Any,
) -> None:
    """Measure the steps of this model, or of discovered models if *model* is None.

    *found* gets the first discovered model. Models are also discovered if the steps never call
    *model*, as the program may call methods of *model* or a module inside it.
    """
    # For an unwrapped LightningModule, discover the modules inside it: Lightning calls its
    # `training_step`, for which no hook runs.
    if model is None or models.is_lightning_module(model):
        discovery.attach(_prepared(progress, options), found)
        return
    stepper = _prepared(progress, options)
    # No search: a user who passes one model passes all models.
    discovery.detach()
    # These hooks go on last, as a step may begin at any moment from now on.
    model_hooks.attach(model, stepper)
    stepper.end.model_came()
    # Search for models if the steps never call this one, but its methods or a module inside it.
    stepper.model_not_called = partial(discovery.attach, stepper, found)
    model_hooks.watch_compiled_in_place()


def _prepared(progress: Progress, options: dict[str, Any]) -> Stepper:
    """Put on all hooks except those on models, and return the stepper."""
    global _current
    # Training begins or is about to begin: stop waiting for it.
    ignore_training()
    for name in ("optimizer", "step_optimizer"):
        options[name] = _of_torch(name, options.get(name))
    # Use a local variable: a signal handler may detach everything, and so reset `_current`, at any
    # moment.
    current = _current
    if current is None or not current.stepper.alive or current.stepper.progress is not progress:
        _take_off()
        current = _current = _Measuring(progress)
        stepper = current.stepper
        optimizer_hooks.attach(stepper)
        data_hooks.attach(stepper)
    stack_answers.start(
        progress.recorder.writer.path,
        lambda: progress.thread,
        progress.device_position,
        _profile,
    )
    current.readings.update_options(**options)
    optimizer_hooks.forget(options["optimizer"])
    # Attach the runtime's hooks now: an evaluation before the first step may compile.
    runtime.attach(current.stepper)
    return current.stepper


def _profile(question: bytes) -> None:
    """Pass on a request for a profile; called by the thread that answers the agent."""
    if (current := _current) is not None:
        current.window.ask(question)


def _of_torch(name: str, given: Any) -> Any:
    """The torch optimizer inside the optimizer or wrapper that the user has passed as *name*."""
    if given is None:
        return None
    found = optimizer_hooks.torchs_own(given)
    if found is None:
        errors.warn_once(
            name,
            "%s=%s: no torch.optim.Optimizer, and none in its .optimizer or ._optimizer, so it is "
            "ignored; steps of other optimizers are measured as without this argument.",
            name,
            type(given).__name__,
        )
    return found


def stop(progress: Progress | None) -> None:
    """Restore torch and the models, if *progress* (None: any) is being measured."""
    if progress is None or _current is None or _current.stepper.progress is progress:
        _take_off()


def _take_off() -> None:
    global _current
    current, _current = _current, None
    ours: list[Callable[[], None]] = []
    if current is not None:
        ours = [current.window.close, current.readings.close, current.stepper.stop]
        ours += [each.take_off for each in (current.evaluates, *current.replaces)]
    # Contain the exceptions of each call on its own, so that after a failure the others still run.
    for hooks in (discovery, model_hooks, data_hooks, optimizer_hooks, runtime):
        ours.append(hooks.detach)
    for act in (*ours, stack_answers.stop):
        errors.contained()(act)()
    if current is not None:
        current.stepper.drop_references()


def _after_fork() -> None:
    # A forked child writes nothing to the journal: it is the parent's, but is mapped here, too.
    global _current
    current, _current = _current, None
    if current is not None:
        current.stepper.leave_to_parent()
        errors.attempt(discovery.detach, None)
        errors.attempt(current.window.leave_to_parent, None)


os.register_at_fork(after_in_child=_after_fork)
