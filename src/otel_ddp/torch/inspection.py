"""Looks at Python's stack, and at users' objects without running a line of the user's code.

A property may compute, draw random numbers, or fetch. So may the `values` of a mapping, the
iterator of a list's subclass, the `shape` of a tensor's subclass, and the `__class__` of a proxy,
which `isinstance` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType, GetSetDescriptorType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_Tensor = torch.Tensor
_Base = torch._C.TensorBase


def ddps_in(model: nn.Module) -> Iterator[nn.Module]:
    """The model if it is DDP, else those inside of it: what wraps them may be torch.compile's."""
    if isinstance(model, DistributedDataParallel):
        yield model
    else:
        for child in model.children():
            yield from ddps_in(child)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes in the `__dict__` of an object."""
    for base in type(value).__mro__:
        # Not `vars`: a class may have a property of this name.
        if type(reader := base.__dict__.get("__dict__")) is GetSetDescriptorType:
            kept = reader.__get__(value)
            return dict(dict.items(kept)) if issubclass(type(kept), dict) else {}
    return {}


def maps(kind: type) -> bool:
    """Whether this class is a mapping, though no dictionary."""
    return Mapping in kind.__mro__


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a dictionary, or of those that a mapping wraps, as `UserDict` does."""
    wrapped = [value] if issubclass(type(value), dict) else attributes(value).values()
    for each in wrapped:
        if issubclass(type(each), dict):
            for key, content in dict.items(each):
                yield key if type(key) is str else "", content


def of_tensor(tensor: Any, name: str) -> Any:
    """An attribute of a tensor, such as `shape`."""
    if type(tensor) is _Tensor:
        return getattr(tensor, name)
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(_Base, name).__get__(tensor)


# What begins a backward, by its name here: what is found by that name may be ours, as where a
# training is waited for.
_AUTOGRAD = vars(torch.autograd)
_BACKWARD, _GRAD = "backward", "grad"
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
    return [each.f_code for each in outward(frame)].count(code)


def roots_of_backward(frame: FrameType | None) -> tuple[Any, ...] | None:
    """What the backward that leads to a frame begins at; None for one of `torch.autograd.grad`.

    It is the outermost one: reentrant checkpointing calls another one inside of it.
    """
    begun = [
        each
        for each in outward(frame)
        if each.f_globals is _AUTOGRAD and each.f_code.co_name in (_BACKWARD, _GRAD)
    ]
    if not begun or begun[-1].f_code.co_name == _GRAD:
        return None
    roots = begun[-1].f_locals.get("tensors", ())
    return tuple(roots) if type(roots) in (tuple, list) else (roots,)


def module_calls(frame: FrameType | None) -> list[dict[str, Any]]:
    """The calls of modules that lead to a frame, innermost first: `self`, `args` and `kwargs`."""
    return [each.f_locals for each in outward(frame) if each.f_code is CALL_MODULE]
