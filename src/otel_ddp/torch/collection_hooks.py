"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import time

from otel_ddp.torch.stepper import Stepper

_stepper: Stepper | None = None
_began = 0


def attach(stepper: Stepper) -> None:
    """Time every collection."""
    global _stepper
    _stepper = stepper
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def detach() -> None:
    """Time none."""
    global _stepper
    _stepper = None
    if _collected in gc.callbacks:
        gc.callbacks.remove(_collected)


def _collected(phase: str, info: dict[str, int]) -> None:
    global _began
    if phase == "start":
        _began = time.monotonic_ns()
    elif _stepper is not None and _began:
        _stepper.standing.gc_ns += time.monotonic_ns() - _began
