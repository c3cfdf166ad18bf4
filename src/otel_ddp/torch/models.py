"""Tells what a model is, and whether its steps can be measured. Imports torch only if need be."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from otel_ddp import errors

# The first with `torch.get_autocast_dtype` and `torch.amp.GradScaler`; also in pyproject.toml.
OLDEST = (2, 4)
# What a torch is built for: its name in torch.version, and ours.
_RUNTIMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


def too_old(version: str) -> str:
    """A warning about a torch that is too old; empty for a newer or an unknown one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"training steps are measured with torch {oldest} or newer, this is {version}: values, "
        "phases and spans of your own are recorded all the same"
    )


def device_runtime(version: Mapping[str, Any]) -> str:
    """What drives the devices of a torch with this torch.version: CUDA 12.8; empty without any."""
    for key, name in _RUNTIMES.items():
        if found := version.get(key):
            # HIP's has the commit of its build behind.
            return f"{name} {str(found).partition('-')[0]}"
    return ""


def can_measure(model: Any) -> bool:
    """Whether the steps of this model (None: of any) can be measured; warns once if not."""
    torch = _import_torch() if model is None else sys.modules.get("torch")
    if torch is None:
        return False
    if model is not None and (
        not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule)
    ):
        errors.warn_once(
            "model",
            "instrument was given a %s, which is no torch.nn.Module that takes hooks: no steps are "
            "measured; what you log is recorded.",
            type(model).__name__,
        )
        return False
    return is_new_enough()


def is_new_enough() -> bool:
    """Whether the steps of a training can be measured with this torch; warns once if not."""
    remark = too_old(str(getattr(sys.modules.get("torch"), "__version__", "")))
    if remark:
        errors.warn_once("torch", "%s.", remark[0].upper() + remark[1:])
    return not remark


def _import_torch() -> Any:
    """torch, imported if need be: a program that names no model is about to import it."""
    try:
        return import_module("torch")
    except ImportError:
        errors.reraise_foreign()
        errors.warn_once(
            "torch",
            "instrument() measures steps of PyTorch, which is not installed here; what you log is "
            "recorded.",
        )
        return None


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
    inner = unwrapped(model)
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


def unwrapped(model: Any) -> Any:
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
    return None if hasattr(model, "parameters") else getattr(model, "module", None)
