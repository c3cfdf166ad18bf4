"""The summary of a tensor, computed on its device: nothing here waits for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from otel_ddp.recording.device_scalars import captures, module_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# They take a sort, so of a larger tensor they are those of every n-th element.
_MOST_SORTED = 65_536


class NoSummary(Exception):
    """The text completes "... was not recorded: "."""


def summary(tensor: Any) -> dict[str, torch.Tensor]:
    """Minimum, maximum, mean, standard deviation and quantiles, each a tensor of one number."""
    if not isinstance(tensor, torch.Tensor):
        raise NoSummary(f"a tensor was expected, got {type(tensor).__name__}")
    if (placements := getattr(tensor, "placements", None)) is not None:
        if not all(each.is_replicate() for each in placements):
            raise NoSummary("its parts are spread over ranks; pass to_local() or full_tensor()")
        tensor = tensor.to_local()
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_quantized:
        raise NoSummary("only dense tensors of real numbers have a summary")
    if not tensor.numel():
        raise NoSummary("it is empty")
    if captures(module_of(tensor.device)):
        raise NoSummary("a graph is being captured; log outside of it")
    # Neither a graph for backward, nor tensors that only inference may use.
    with torch.inference_mode(False), torch.no_grad():
        return _computed(tensor.detach())


def _computed(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    count = tensor.numel()
    some = _some(tensor, -(-count // _MOST_SORTED)).to(_at_least_float32(tensor))
    lowest, highest = torch.aminmax(tensor)
    if tensor.dtype.is_floating_point:
        # The sum is made in float32 without a copy of the tensor in it.
        mean = tensor.mean(dtype=some.dtype)
        # In the tensor's own type, but of differences: those of squares lose all digits where the
        # values lie close together, as weights around 1 do.
        spread = tensor.std(correction=0)
    else:
        mean, spread = some.mean(), some.std(correction=0)
    found = {"min": lowest, "max": highest, "mean": mean, "std": spread}
    # Not torch.quantile, whose points would have to be copied to the device: that waits for it.
    rising = some.sort().values
    for quantile in QUANTILES:
        place = quantile * (len(rising) - 1)
        below, above = rising[math.floor(place)], rising[math.ceil(place)]
        found[f"p{quantile * 100:02.0f}"] = below + (above - below) * (place % 1)
    return found


def _some(tensor: torch.Tensor, every: int) -> torch.Tensor:
    """Every n-th value, in the order in which they lie in memory: so nothing is copied for it."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)[::every]


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
