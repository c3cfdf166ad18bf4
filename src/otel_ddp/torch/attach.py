"""Puts the hooks on, and takes them off: one stepper a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from otel_ddp import containment
from otel_ddp.recording.progress import Progress
from otel_ddp.torch import discovery, stack_answers
from otel_ddp.torch.hooks import compile as compile_hooks
from otel_ddp.torch.hooks import data as data_hooks
from otel_ddp.torch.hooks import garbage
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.readings.between_steps import Readings, StepOptions
from otel_ddp.torch.stepper import Stepper

_stepper: Stepper | None = None
_readings: Readings | None = None


def watch(model: nn.Module, progress: Progress, **wishes: Any) -> None:
    """Measure the steps that train this model."""
    if isinstance(model, ScriptModule):
        containment.warn_once(
            "script",
            "A model that torch.jit has scripted or traced takes no hooks, so its steps cannot be "
            "measured; what you log is recorded as before.",
        )
        return
    stepper = _prepared(progress, wishes)
    # Who names a model names them all.
    discovery.detach()
    # Hooks go last: from here on a step may begin at any moment.
    model_hooks.attach(model, stepper)
    stepper.another_model()
    model_hooks.watch_compiled()


def look_for_models(progress: Progress, found: Callable[[nn.Module], None], **wishes: Any) -> None:
    """Measure the steps that train whatever model there will be; *found* is told of it."""
    discovery.attach(_prepared(progress, wishes), found)


def _prepared(progress: Progress, wishes: dict[str, Any]) -> Stepper:
    """Listen to all but models."""
    global _stepper, _readings
    wishes |= {name: _of_torch(name, wishes.get(name)) for name in ("optimizer", "step_optimizer")}
    # Kept in hand: a signal handler may take off all of it at any moment.
    stepper, readings = _stepper, _readings
    if stepper is None or readings is None or not stepper.alive or stepper.progress is not progress:
        unwatch(None)
        stepper = _stepper = Stepper(progress)
        readings = _readings = Readings(stepper)
        optimizer_hooks.attach(stepper)
        data_hooks.attach(stepper)
        garbage.attach(stepper)
    stack_answers.start(progress.recorder.writer.path, lambda: progress.training_thread)
    readings.hear(StepOptions(**wishes))
    optimizer_hooks.expect(wishes["optimizer"])
    # Who only evaluates compiles as well.
    compile_hooks.attach(stepper)
    return stepper


def _of_torch(name: str, given: Any) -> Any:
    """The optimizer that torch's hooks tell of, where one that wraps it is named."""
    if given is None:
        return None
    found = optimizer_hooks.heard(given)
    if found is None:
        containment.warn_once(
            name,
            "%s=%s: no torch.optim.Optimizer, and none in its .optimizer or ._optimizer, so its "
            "steps are not seen; the others are measured as if it had not been named.",
            name,
            type(given).__name__,
        )
    return found


def unwatch(progress: Progress | None) -> None:
    """Leave torch and the models as they were found; if *standing* is given, only what it has."""
    global _stepper, _readings
    readings, stepper = _readings, _stepper
    if progress is not None and stepper is not None and stepper.progress is not progress:
        return
    _readings = _stepper = None
    # Each by itself: what fails here must leave none of the others behind.
    for act in (
        *((readings.close,) if readings is not None else ()),
        *((stepper.stop,) if stepper is not None else ()),
        *(discovery.detach, model_hooks.detach, optimizer_hooks.detach, data_hooks.detach),
        *(garbage.detach, compile_hooks.detach, stack_answers.stop),
    ):
        containment.contained()(act)()


def _after_fork() -> None:
    # The journal is mapped here as well, and is the parent's: not a word may be written to it.
    global _stepper, _readings
    readings, _readings = _readings, None
    if _stepper is not None:
        _stepper.alive = False
        _stepper = None
    containment.attempt(discovery.detach, None)
    if readings is not None:
        containment.attempt(readings.leave_to_parent, None)


os.register_at_fork(after_in_child=_after_fork)
