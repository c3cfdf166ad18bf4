"""Tells whether the torch that is here has what the hooks need. Imports it only if need be."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

from otel_ddp import errors

# The first with `torch.get_autocast_dtype` and `torch.amp.GradScaler`; also in pyproject.toml.
OLDEST = (2, 4)


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


def can_measure(model: Any) -> bool:
    """Whether the steps of this model (None: of any) can be measured; warns once if not."""
    torch = _import_torch() if model is None else sys.modules.get("torch")
    if torch is None:
        return False
    if model is not None and not isinstance(model, torch.nn.Module):
        errors.warn_once(
            "model",
            "instrument was given a %s, which is no torch.nn.Module: no steps are measured; "
            "what you log is recorded.",
            type(model).__name__,
        )
        return False
    if remark := too_old(str(getattr(torch, "__version__", ""))):
        errors.warn_once("torch", "%s.", remark[0].upper() + remark[1:])
        return False
    return True


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
