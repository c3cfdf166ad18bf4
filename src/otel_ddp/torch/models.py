"""Checks whether models and the installed torch can be measured. Imports torch only if needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from otel_ddp import errors

# The first version with `torch.get_autocast_dtype` and `torch.amp.GradScaler`; also in
# pyproject.toml.
OLDEST = (2, 4)
# Attribute of torch.version -> name of the device runtime.
_RUNTIMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


def too_old(version: str) -> str:
    """A warning if this version of torch is too old, else empty."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"training steps are measured with torch {oldest} or newer, this is {version}: values, "
        "phases and spans of your own are recorded all the same"
    )


def device_runtime(version: Mapping[str, Any]) -> str:
    """The device runtime, such as "CUDA 12.8", from torch.version; empty for CPU builds."""
    for key, name in _RUNTIMES.items():
        if found := version.get(key):
            # Drop the commit at the end of HIP's version.
            return f"{name} {str(found).partition('-')[0]}"
    return ""


def can_measure(model: Any) -> bool:
    """Whether steps of this model (None: of any model) can be measured; warns once if not."""
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
    """Whether this torch is new enough to measure steps; warns once if not."""
    remark = too_old(str(getattr(sys.modules.get("torch"), "__version__", "")))
    if remark:
        errors.warn_once("torch", "%s.", remark[0].upper() + remark[1:])
    return not remark


def _import_torch() -> Any:
    """The torch module; imports it if necessary, as a program that trains will do so anyway."""
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


# Class name of a wrapper -> its attribute with the model. By name, to avoid imports.
_WRAPPERS = {
    **dict.fromkeys(("DistributedDataParallel", "DataParallel"), "module"),
    **dict.fromkeys(("FullyShardedDataParallel", "AveragedModel", "DeepSpeedEngine"), "module"),
    "OptimizedModule": "_orig_mod",
}
_MOST_WRAPPERS = 8
_LONGEST_NAME = 200


def describe(model: Any) -> dict[str, Any]:
    """The class of a model, as a fact of the run."""
    return {"model": type(unwrapped(model)).__name__[:_LONGEST_NAME]}


def is_lightning_module(model: Any) -> bool:
    """Whether this is a LightningModule, from `lightning` or `pytorch_lightning`."""
    return any(each.__name__ == "LightningModule" for each in type(model).__mro__)


def makes_steps(model: Any) -> bool:
    """Whether this wraps a LightningModule with manual optimization.

    A call of such a wrapper is a whole step: `training_step` runs backward and optimizer.
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
    """The model inside one wrapper; None if this is no wrapper."""
    for each in type(model).__mro__:
        if (name := _WRAPPERS.get(each.__name__)) is not None:
            return getattr(model, name, None)
    # An unknown class is a wrapper if it has a `module` but no `parameters`. With `parameters` it
    # may be a model, and `module` a part of it.
    return None if hasattr(model, "parameters") else getattr(model, "module", None)
