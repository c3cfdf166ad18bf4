"""How much a step works on, from the shapes of what the model is given: never from values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# What language models call their input; its elements are tokens.
_TOKEN_NAMES = ("input_ids", "tokens", "idx")
_MOST = 16
_Tensor = torch.Tensor


def workload(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Samples and tokens of one forward; 0 for what the shapes do not tell."""
    # The two ways in which nearly every model is called, without the search.
    only: Any = None
    if kwargs:
        only = kwargs.get("input_ids")
    elif len(args) == 1:
        only = args[0]
    if type(only) is _Tensor and (shape := only.shape):
        if len(shape) == 2 and not only.dtype.is_floating_point:
            return shape[0], shape[0] * shape[1]
        if not kwargs:
            return shape[0], 0
    samples = tokens = 0
    for name, tensor in _tensors(args, kwargs):
        shape = tensor.shape
        if not shape:
            continue
        if tensor.is_floating_point():
            samples = samples or shape[0]
        elif name in _TOKEN_NAMES or (not tokens and len(shape) == 2):
            samples, tokens = shape[0], tensor.numel()
            if name in _TOKEN_NAMES:
                break
        else:
            samples = samples or shape[0]
    return samples, tokens


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the inputs, and one level into the batch where it is a container."""
    for name, value in [*(("", each) for each in args), *kwargs.items()][:_MOST]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            for key, inner in list(value.items())[:_MOST]:
                if isinstance(inner, torch.Tensor):
                    yield str(key), inner
        elif type(value) in (list, tuple):
            for inner in value[:_MOST]:
                if isinstance(inner, torch.Tensor):
                    yield name, inner
