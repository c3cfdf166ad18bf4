"""Walks Python's stack: which functions and which modules are being called."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import nn

# The code of torch that every call of a module passes through. Private.
CALL_MODULE = nn.Module._wrapped_call_impl.__code__


def outward(frame: FrameType | None) -> list[FrameType]:
    """A frame, its caller, the caller of that, and so on."""
    # No generator: an exception that a signal handler raises in one may be lost.
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def times_called(frame: FrameType | None, code: Any) -> int:
    """How many calls of this code lead to a frame."""
    found = 0
    while frame is not None:
        found += frame.f_code is code
        frame = frame.f_back
    return found


def module_calls(frame: FrameType | None) -> list[dict[str, Any]]:
    """The calls of modules that lead to a frame, innermost first: `self`, `args` and `kwargs`."""
    return [each.f_locals for each in outward(frame) if each.f_code is CALL_MODULE]
