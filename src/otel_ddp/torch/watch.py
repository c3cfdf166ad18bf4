"""Puts the hooks on, and takes them off: one stepper a process."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from otel_ddp import containment
from otel_ddp.progress import Standing
from otel_ddp.torch import (
    collection_hooks,
    compile_hooks,
    data_hooks,
    model_hooks,
    optimizer_hooks,
    witness,
)
from otel_ddp.torch.readings import Readings, Wishes
from otel_ddp.torch.stepper import Stepper

_stepper: Stepper | None = None
_readings: Readings | None = None


def watch(model: Any, standing: Standing, **wishes: Any) -> None:
    """Measure the steps that train this model; one that is no module has no hooks to offer."""
    global _stepper, _readings
    if not isinstance(model, nn.Module):
        return
    if _stepper is None or not _stepper.alive:
        unwatch()
        _stepper = Stepper(standing)
        _readings = Readings(_stepper)
        optimizer_hooks.attach(_stepper)
        data_hooks.attach(_stepper)
        collection_hooks.attach(_stepper)
    assert _readings is not None
    witness.start(standing.recorder.writer.path)
    _readings.hear(Wishes(**wishes))
    optimizer_hooks.expect(wishes.get("optimizer"))
    # Hooks go last: from here on a step may begin at any moment.
    model_hooks.attach(model, _stepper)
    model_hooks.watch_compiled()


def unwatch() -> None:
    """Leave torch and the models as they were found."""
    global _stepper, _readings
    readings, stepper = _readings, _stepper
    _readings = _stepper = None
    # Each by itself: what fails here must leave none of the others behind.
    for act in (
        *((readings.close,) if readings is not None else ()),
        *((stepper.stop,) if stepper is not None else ()),
        *(model_hooks.detach, optimizer_hooks.detach, data_hooks.detach),
        *(collection_hooks.detach, compile_hooks.detach, witness.stop),
    ):
        containment.contained()(act)()


def _after_fork() -> None:
    # The journal is mapped here as well, and is the parent's: not a word may be written to it.
    global _stepper, _readings
    _readings = None
    if _stepper is not None:
        _stepper.alive = False
        _stepper = None


os.register_at_fork(after_in_child=_after_fork)
