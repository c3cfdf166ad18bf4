"""Describes the model that is trained: the one inside DDP, FSDP, DeepSpeed and torch.compile."""

from __future__ import annotations

from typing import Any

from otel_ddp import errors

# The class of a wrapper -> the attribute with the model inside. By name: asking for the types
# would import them.
_WRAPPERS = {
    **dict.fromkeys(("DistributedDataParallel", "DataParallel"), "module"),
    **dict.fromkeys(("FullyShardedDataParallel", "AveragedModel", "DeepSpeedEngine"), "module"),
    "OptimizedModule": "_orig_mod",
}
_MOST_WRAPPERS = 8
_LONGEST_NAME = 200


def describe(model: Any) -> dict[str, Any]:
    """The class of a model, and how many of its parameters are trained and frozen."""
    inner = _unwrapped(model)
    counts: dict[str, int] = {}
    for parameter in inner.parameters() if hasattr(inner, "parameters") else ():
        key = "true" if parameter.requires_grad else "false"
        # A lazy parameter has no size yet, and raises.
        size = errors.attempt(parameter.numel, 0)
        counts[key] = counts.get(key, 0) + int(size)
    return {"model": type(inner).__name__[:_LONGEST_NAME], "parameters": counts}


def is_lightning_module(model: Any) -> bool:
    """Whether this is a LightningModule, of either of Lightning's packages."""
    return any(each.__name__ == "LightningModule" for each in type(model).__mro__)


def makes_steps(model: Any) -> bool:
    """Whether this wraps a LightningModule with manual optimization.

    A call of the wrapper is a whole step then: `training_step` runs backward and optimizer inside.
    """
    inner = model
    while any((name := _WRAPPERS.get(each.__name__)) for each in type(inner).__mro__):
        inner = getattr(inner, name or "", None)
    return (
        inner is not model
        and is_lightning_module(inner)
        and errors.attempt(lambda: not inner.automatic_optimization, False)
    )


def _unwrapped(model: Any) -> Any:
    """The model inside all of its wrappers."""
    for _ in range(_MOST_WRAPPERS):
        inner = _wrapped(model)
        if inner is None:
            break
        model = inner
    return model


def _wrapped(model: Any) -> Any:
    """What a wrapper wraps; None for a model."""
    for each in type(model).__mro__:
        if (name := _WRAPPERS.get(each.__name__)) is not None:
            return getattr(model, name, None)
    # Any other class with a `module` may be a model, and `module` a part of it.
    if not hasattr(model, "parameters"):
        return getattr(model, "module", None)
    if not hasattr(model, "named_children") or any(True for _ in model.parameters(recurse=False)):
        return None
    parts = dict(model.named_children())
    return parts["module"] if parts.keys() == {"module"} else None
