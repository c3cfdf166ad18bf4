"""Reads the loss that a model returns, and the norm of the gradients, without a collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from operator import getitem
from typing import Any, NamedTuple

import torch

from otel_ddp.torch import inspection
from otel_ddp.torch.steps.watched_model import WatchedModel

# A loss is read every tenth of a second. Where so many steps have gone by, looking at each would
# take more than half a percent of them.
_MANY_STEPS = 64
# How much of a tuple is searched for a loss.
_MOST_RETURNED = 16


class ReturnedLoss:
    """The loss of the last forward that was asked for one, and the first that was not finite.

    Each loss comes with the number of steps before its own.
    """

    def __init__(self) -> None:
        self.asked = False
        """Whether a forward was asked at all."""
        self.missing = ""
        """Why the last forward gave no loss; empty where it gave one."""
        self._found: dict[int, Any] = {}
        self._read_before = 0
        self._place: _Place | None = None
        self._before = self._last = (-1, math.nan)  # of two steps, the first finite loss

    def read(self, watched: WatchedModel, output: Any, steps_before: int) -> bool:
        """Keep what this forward returns; whether further losses can be checked."""
        self.asked = True
        # A share of a mean over all ranks is no loss of this one.
        loss, self.missing = (None, "divided_loss") if watched.divided_loss else loss_of(output)
        if loss is not None:
            self._found.setdefault(steps_before, loss)
        short = steps_before - self._read_before > _MANY_STEPS
        self._read_before = steps_before
        at_hand = loss is not None and loss.is_cpu and not short
        self._place = _place(watched, output) if at_hand else None
        return self._place is not None

    def check(self, watched: WatchedModel, output: Any, steps_before: int) -> None:
        """Keep the first loss that is not finite, and one of the step before it."""
        assert self._place is not None
        model, kind, get, key = self._place
        loss: Any = get(output, key) if watched is model and type(output) is kind else None
        if type(loss) is not torch.Tensor or not loss.is_cpu or loss.dim():
            return
        value = loss.item()
        if value - value == 0:
            if self._last[0] != steps_before:
                self._before, self._last = self._last, (steps_before, value)
            return
        finite = self._last if self._last[0] < steps_before else self._before
        if finite[0] >= 0:
            self._found |= {finite[0]: finite[1], steps_before: value}
        self._before = self._last = (-1, math.nan)

    def pop(self) -> list[tuple[int, Any]]:
        """The losses to record, in the order of their steps."""
        found, self._found = self._found, {}
        return sorted(found.items())


class _Place(NamedTuple):
    """Where the loss lies in what a model returns; nothing of the user's runs to get it."""

    model: WatchedModel
    kind: type
    get: Callable[[Any, Any], Any]
    key: Any


def _place(model: WatchedModel, output: Any) -> _Place | None:
    kind = type(output)
    if kind is torch.Tensor:
        return _Place(model, kind, lambda loss, _: loss, None)
    if issubclass(kind, dict):
        return _Place(model, kind, dict.get, "loss")
    if kind is tuple:
        index = next(i for i, each in enumerate(output) if _may_be_a_loss(each))
        return _Place(model, kind, getitem, index)
    return None


def loss_of(output: Any) -> tuple[Any, str]:
    """The loss in what a model returns, and why there is none.

    It is a copy: the loop may change the loss itself in place.
    """
    kind = type(output)
    loss: Any
    if issubclass(kind, torch.Tensor):
        loss = output if len(inspection.of_tensor(output, "shape")) == 0 else None
    elif issubclass(kind, dict):
        loss = dict.get(output, "loss")
    elif inspection.maps(kind):
        loss = dict(inspection.items(output)).get("loss")
    else:
        loss = inspection.attribute(output, "loss")
        if loss is None and issubclass(kind, tuple | list):
            # `return logits, loss`
            each = (tuple if issubclass(kind, tuple) else list).__iter__(output)
            scalars = [one for one in islice(each, _MOST_RETURNED) if _may_be_a_loss(one)]
            if len(scalars) > 1:
                return None, "several_losses"
            loss = scalars[0] if scalars else None
    # A user's subclass of a tensor would be copied by the user's code.
    if not _is_torchs(loss) or loss.numel() != 1:
        return None, "no_loss"
    return loss.detach().clone(), ""


def _may_be_a_loss(value: Any) -> bool:
    """Whether it is a single number that backward may begin at."""
    return (
        _is_torchs(value)
        # One element of a vector may be anything: what a critic thinks of a state, say.
        and value.dim() == 0
        and value.is_floating_point()
        and bool(value.requires_grad)
    )


def _is_torchs(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, torch.Tensor) and str(kind.__module__).partition(".")[0] == "torch"


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
