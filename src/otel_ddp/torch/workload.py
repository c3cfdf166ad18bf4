"""How much a step works on, from the shapes of what the model is given: never from values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from otel_ddp.torch import held

# What language models call their input; its elements are tokens.
_TOKEN_NAMES = ("input_ids", "tokens", "idx")
_WHOLE = frozenset(
    getattr(torch, name)
    for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
    if hasattr(torch, name)
)
_MOST = 16
_Tensor = torch.Tensor

# Private, and asked for by name so that a torch without them costs only what they are for.
_in_functorch = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_functorch = getattr(torch._C, "_functorch", None)
_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
_unwrapped = getattr(_functorch, "get_unwrapped", None)


def workload(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    """Samples and tokens of one forward; 0 for what the shapes do not tell."""
    if _in_functorch():
        return _transformed(args, kwargs)
    # The two ways in which nearly every model is called, without the search.
    only: Any = None
    if kwargs:
        only = kwargs.get("input_ids")
    elif len(args) == 1:
        only = args[0]
    if type(only) is _Tensor and (shape := only.shape):
        if len(shape) == 2 and only.dtype in _WHOLE:
            return shape[0], shape[0] * shape[1]
        if not kwargs:
            return shape[0], 0
    return _searched(args, kwargs)


def _searched(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    samples = tokens = 0
    for name, tensor in _tensors(args, kwargs):
        if type(tensor) is _Tensor:
            shape, dtype = tensor.shape, tensor.dtype
        else:
            shape, dtype = held.of_tensor(tensor, "shape"), held.of_tensor(tensor, "dtype")
        if not shape:
            continue
        if dtype not in _WHOLE:
            samples = samples or shape[0]
        elif name in _TOKEN_NAMES or (not tokens and len(shape) == 2):
            samples, tokens = shape[0], _numel(tensor)
            if name in _TOKEN_NAMES:
                break
        else:
            samples = samples or shape[0]
    return samples, tokens


def _numel(tensor: Any) -> Any:
    if type(tensor) is _Tensor:
        return tensor.numel()
    with torch._C.DisableTorchFunctionSubclass():
        return torch._C.TensorBase.numel(tensor)


def _transformed(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    """The same inside `vmap` and the like, whose batch is in no shape.

    Given one sample at a time, a model works on as many as lie side by side. Given several, or one
    without its dimension, nobody can tell which of them these are.
    """
    if _is_wrapped is None or _unwrapped is None:
        return 0, 0
    samples, tokens = _searched(args, kwargs)
    mapped = 1
    for _, tensor in _tensors(args, kwargs):
        inner = tensor
        while _is_wrapped(inner):
            inner = _unwrapped(inner)
        mapped = max(mapped, _numel(inner) // max(1, _numel(tensor)))
    if mapped == 1:
        return samples, tokens
    return (mapped, mapped * tokens) if samples == 1 else (0, 0)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """The tensors among the inputs, and one level into the batch where it is a container."""
    given = [*(("", each) for each in args), *(kwargs.items() if kwargs else ())]
    for name, value in given[:_MOST]:
        kind = type(value)
        if issubclass(kind, _Tensor):
            yield name, value
        elif issubclass(kind, dict) or held.maps(kind):
            for key, inner in islice(held.items(value), _MOST):
                if issubclass(type(inner), _Tensor):
                    yield key, inner
        elif kind in (list, tuple):
            for inner in value[:_MOST]:
                if issubclass(type(inner), _Tensor):
                    yield name, inner
