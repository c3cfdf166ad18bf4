"""Starts and stops the measuring of training steps, where torch and the model allow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_ddp.errors import containment
from otel_ddp.torch.versions import too_old

if TYPE_CHECKING:
    from otel_ddp.recording.progress import Progress


def can_measure(model: Any) -> bool:
    """Whether the steps of this model (None: of any) can be measured; warns once if not."""
    torch = _import_torch() if model is None else sys.modules.get("torch")
    if torch is None:
        return False
    if model is not None and not isinstance(model, torch.nn.Module):
        containment.warn_once(
            "model",
            "instrument was given a %s, which is no torch.nn.Module: no steps are measured; "
            "what you log is recorded.",
            type(model).__name__,
        )
        return False
    if remark := too_old(str(getattr(torch, "__version__", ""))):
        containment.warn_once("torch", "%s.", remark[0].upper() + remark[1:])
        return False
    return True


def start(model: Any, progress: Progress, found: Callable[[Any], None], **options: Any) -> None:
    """Measure the steps of this model, or of the models that are found: *found* gets the first."""
    # Only here: the hooks need a torch that is new enough.
    from otel_ddp.torch import attach, wrappers

    # Unwrapped, Lightning's module trains in its `training_step`, which calls no hook.
    if model is None or wrappers.is_lightning_module(model):
        attach.search_for_models(progress, found, **options)
    else:
        attach.watch(model, progress, found, **options)


def stop(progress: Progress) -> None:
    """Take every hook off again."""
    if "otel_ddp.torch.attach" in sys.modules:
        from otel_ddp.torch import attach

        attach.unwatch(progress)


def _import_torch() -> Any:
    """torch, imported if need be: a program that names no model is about to import it."""
    try:
        return import_module("torch")
    except ImportError:
        containment.reraise_foreign()
        containment.warn_once(
            "torch",
            "instrument() measures steps of PyTorch, which is not installed here; what you log is "
            "recorded.",
        )
        return None
