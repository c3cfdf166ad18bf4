"""Inspects stacks, and users' objects without running any user code.

User code may compute, draw random numbers or block. It may be behind a property, the `values` of a
mapping, the iterator of a list subclass, the `shape` of a tensor subclass, and the `__class__` of a
proxy, which `isinstance` reads.
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
    """The model itself if it is a DDP, else the DDPs inside it, as in a compiled module."""
    if isinstance(model, DistributedDataParallel):
        yield model
    else:
        for child in model.children():
            yield from ddps_in(child)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes in the `__dict__` of an object."""
    for base in type(value).__mro__:
        # Not `vars(value)`: a class may define `__dict__` as a property.
        if type(reader := base.__dict__.get("__dict__")) is GetSetDescriptorType:
            kept = reader.__get__(value)
            return dict(dict.items(kept)) if issubclass(type(kept), dict) else {}
    return {}


def is_mapping(kind: type) -> bool:
    """Whether this class is a mapping but not a dictionary."""
    return Mapping in kind.__mro__


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a dictionary, or of the dictionary that a mapping such as `UserDict` wraps."""
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


# Frames of autograd's functions are recognized by globals and name, not by code object: we may have
# wrapped these functions.
_AUTOGRAD = vars(torch.autograd)
_BACKWARD, _GRAD = "backward", "grad"
# The code through which torch calls every module; private in torch.
CALL_MODULE = nn.Module._wrapped_call_impl.__code__


def outward(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers, innermost first."""
    # Return a list: an exception that a signal handler raises inside a generator may be lost.
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def times_called(frame: FrameType | None, code: Any) -> int:
    """How often this code is on the stack."""
    return [each.f_code for each in outward(frame)].count(code)


def roots_of_backward(frame: FrameType | None) -> tuple[Any, ...] | None:
    """The roots of the outermost backward on the stack; None for `torch.autograd.grad`.

    Backwards inside the outermost one are ignored: reentrant checkpointing starts those.
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
    """The module calls on the stack, innermost first: `self`, `args` and `kwargs`."""
    return [each.f_locals for each in outward(frame) if each.f_code is CALL_MODULE]
