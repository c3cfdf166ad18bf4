"""Counts replays of CUDA graphs that contain optimizer steps, by torch's own hooks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None
_handles: list[Any] = []
# How many training steps each replay of a graph makes; a graph without one is not listed.
_steps = WeakKeyDictionary[Any, int]()


def attach(stepper: Stepper) -> None:
    """Register the hooks. PyTorch before 2.15 has none: there a replayed step is not seen."""
    global _stepper
    detach()
    _stepper = stepper
    for name, hook in (
        ("capture_start", _capture_began),
        ("capture_end", _capture_ended),
        ("replay_start", _replay_began),
        ("replay_end", _replay_ended),
    ):
        register = getattr(torch.cuda.graphs, f"register_graph_{name}_hook", None)
        if register is not None:
            _handles.append(register(hook))


def detach() -> None:
    """Remove the hooks. A graph that outlives them counts again if they come back."""
    global _stepper
    _stepper = None
    while _handles:
        _handles.pop().remove()


def _capture_began(graph: Any) -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive:
        stepper.act("before a capture", stepper.capture_began)


def _capture_ended(graph: Any) -> None:
    stepper = _stepper
    # Not by `act`, which ignores all hooks during a capture.
    if stepper is not None and stepper.alive and (steps := stepper.capture_ended()):
        _steps[graph] = steps


def _replay_began(graph: Any) -> None:
    stepper = _stepper
    if _steps and stepper is not None and stepper.alive and graph in _steps:
        stepper.act("before a replay", stepper.replay_began)


def _replay_ended(graph: Any) -> None:
    stepper = _stepper
    if _steps and stepper is not None and stepper.alive and (steps := _steps.get(graph)):
        stepper.act("after a replay", stepper.replay_ended, steps)
