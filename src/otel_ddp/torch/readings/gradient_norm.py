"""Computes the norm of the gradients of a step without a collective."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

_NARROW = (torch.float16, torch.bfloat16)


class SquareNorm(NamedTuple):
    """A number on the device of the gradients: the host does not wait for it."""

    value: torch.Tensor
    sharded: bool
    """Whether it is this rank's part of a sum over all ranks."""


def square_norm(gradients: Iterable[torch.Tensor | None]) -> SquareNorm | None:
    """Of all gradients together; None where what this rank holds is not enough to know it."""
    whole: list[torch.Tensor] = []
    parts: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is None:
            continue
        copies = _copies(gradient)
        if copies == 0 or gradient.layout is not torch.strided:
            return None
        if copies is None:
            whole.append(gradient)
        else:
            # Never a norm of the DTensor itself: that is a collective.
            parts.setdefault(copies, []).append(gradient.to_local())
    if len({each.device for each in [*whole, *(g for many in parts.values() for g in many)]}) != 1:
        return None
    with torch.no_grad():
        if not parts:
            return SquareNorm(_squares(whole), False)
        # Gradients that every rank has whole are left out: a sum over ranks would count them many
        # times.
        shares = [_squares(many) / copies for copies, many in parts.items()]
        return SquareNorm(torch.stack(shares).sum(), True)


def _copies(gradient: Any) -> int | None:
    """On how many ranks each part of it lies; None for no DTensor, 0 where that is unknown."""
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return None
    copies = 1
    for dimension, placement in enumerate(placements):
        if placement.is_partial():
            return 0
        if placement.is_replicate():
            copies *= int(gradient.device_mesh.size(dimension))
    return copies


def _squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    # The square of a float16 overflows one.
    norms = [
        torch.linalg.vector_norm(each, dtype=torch.float32 if each.dtype in _NARROW else None)
        for each in gradients
    ]
    return torch.stack([norm.to(torch.float32) for norm in norms]).square().sum()
