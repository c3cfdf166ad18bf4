"""Reads the loss that a model returns."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from otel_ddp.torch import inspect_values

# How much of a tuple is searched for a loss.
_MOST_RETURNED = 16


class ReturnedLoss:
    """The loss of the last forward that was asked for one."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a forward was asked at all."""
        self.missing = ""
        """Why the last forward gave no loss; empty where it gave one."""
        self._loss: Any = None
        self._steps_before = 0

    def read(self, output: Any, divided: bool, steps_before: int) -> None:
        """Keep what this forward returns. *divided*: it is a share of a mean over all ranks."""
        self.asked = True
        self._steps_before = steps_before
        if divided:
            self._loss, self.missing = None, "divided_loss"
        else:
            self._loss, self.missing = loss_of(output)

    def pop(self) -> tuple[Any, int]:
        """The loss, once (None: there is none), and how many steps came before its own."""
        loss, self._loss = self._loss, None
        return loss, self._steps_before


def loss_of(output: Any) -> tuple[Any, str]:
    """The loss in what a model returns, and why there is none.

    It is a copy: the loop may change the loss itself in place.
    """
    kind = type(output)
    loss: Any
    if issubclass(kind, torch.Tensor):
        loss = output if len(inspect_values.of_tensor(output, "shape")) == 0 else None
    elif issubclass(kind, dict):
        loss = dict.get(output, "loss")
    elif inspect_values.maps(kind):
        loss = dict(inspect_values.items(output)).get("loss")
    else:
        loss = inspect_values.attribute(output, "loss")
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
