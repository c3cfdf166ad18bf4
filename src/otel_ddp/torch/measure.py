"""Starts and stops the measuring of training steps: one stepper a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from otel_ddp import errors
from otel_ddp.recording.progress import Progress
from otel_ddp.torch import discovery, models, stack_answers, training_begins
from otel_ddp.torch.hooks import compile as compile_hooks
from otel_ddp.torch.hooks import data as data_hooks
from otel_ddp.torch.hooks import garbage
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.profile_window import ProfileWindow
from otel_ddp.torch.readings.between_steps import Readings, StepOptions
from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None
_readings: Readings | None = None
_profile_window: ProfileWindow | None = None


def start(
    model: nn.Module | None,
    progress: Progress,
    found: Callable[[nn.Module], None],
    **options: Any,
) -> None:
    """Measure the steps that train this model, or the models that will be found; None: those.

    *found* gets the first of these. A model that is named, and that no step calls, is one of them:
    its methods are called, or what it wraps.
    """
    # Unwrapped, Lightning's module trains in its `training_step`, which calls no hook.
    if model is None or models.is_lightning_module(model):
        discovery.attach(_prepared(progress, options), found)
        return
    if isinstance(model, ScriptModule):
        errors.warn_once(
            "script",
            "A model that torch.jit has scripted or traced takes no hooks, so its steps cannot be "
            "measured; what you log is recorded as before.",
        )
        return
    stepper = _prepared(progress, options)
    # A user who names one model names all of them.
    discovery.detach()
    # Hooks go last: from here on a step may begin at any moment.
    model_hooks.attach(model, stepper)
    stepper.step.end.model_came()
    stepper.step.search = discovery.NamedModel(stepper, found)
    model_hooks.watch_compiled_in_place()


def _prepared(progress: Progress, options: dict[str, Any]) -> Stepper:
    """Put on all hooks but those on models."""
    global _stepper, _readings, _profile_window
    # The program has a line of ours, or the first step is here.
    training_begins.stop()
    for name in ("optimizer", "step_optimizer"):
        options[name] = _of_torch(name, options.get(name))
    # Locals: a signal handler may take all hooks off at any moment.
    stepper, readings = _stepper, _readings
    if stepper is None or readings is None or not stepper.alive or stepper.progress is not progress:
        stop(None)
        stepper = _stepper = Stepper(progress)
        readings = _readings = Readings(stepper)
        _profile_window = ProfileWindow(progress, stepper.sampled)
        optimizer_hooks.attach(stepper)
        data_hooks.attach(stepper)
        garbage.attach(stepper)
    stack_answers.start(
        progress.recorder.writer.path,
        lambda: progress.thread.ident,
        progress.device_position,
        _profile,
    )
    readings.update_options(StepOptions(**options))
    optimizer_hooks.forget(options["optimizer"])
    # Now, not at the first step: an evaluation may compile as well.
    compile_hooks.attach(stepper)
    return stepper


def _profile(question: bytes) -> None:
    """The thread of the questions has read one for a profile."""
    window = _profile_window
    if window is not None:
        window.ask(question)


def _of_torch(name: str, given: Any) -> Any:
    """The optimizer that calls torch's hooks, where the user has named what wraps it."""
    if given is None:
        return None
    found = optimizer_hooks.torchs_own(given)
    if found is None:
        errors.warn_once(
            name,
            "%s=%s: no torch.optim.Optimizer, and none in its .optimizer or ._optimizer, so its "
            "steps are not seen; the others are measured as if it had not been named.",
            name,
            type(given).__name__,
        )
    return found


def stop(progress: Progress | None) -> None:
    """Leave torch and the models as they were found, if this progress is measured; None: any."""
    global _stepper, _readings, _profile_window
    readings, stepper, window = _readings, _stepper, _profile_window
    if progress is not None and stepper is not None and stepper.progress is not progress:
        return
    _readings = _stepper = _profile_window = None
    # Each by itself: one that fails must not keep the others from being done.
    for act in (
        *((window.close,) if window is not None else ()),
        *((readings.close,) if readings is not None else ()),
        *((stepper.stop,) if stepper is not None else ()),
        *(discovery.detach, model_hooks.detach, optimizer_hooks.detach, data_hooks.detach),
        *(garbage.detach, compile_hooks.detach, stack_answers.stop),
    ):
        errors.contained()(act)()


def _after_fork() -> None:
    # The journal is the parent's, and is mapped here as well: nothing may be written to it.
    global _stepper, _readings, _profile_window
    readings, _readings = _readings, None
    window, _profile_window = _profile_window, None
    if _stepper is not None:
        _stepper.leave_to_parent()
        _stepper = None
    errors.attempt(discovery.detach, None)
    if window is not None:
        errors.attempt(window.leave_to_parent, None)
    if readings is not None:
        errors.attempt(readings.leave_to_parent, None)


os.register_at_fork(after_in_child=_after_fork)
