"""Reads the loss of a step: the number at which its backward begins."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.steps import StepNumbers

_MULTIPLIED, _DIVIDED = "MulBackward", "DivBackward"
# Such a node makes one number of one number; so does one that was given a single one.
_ONE_TO_ONE = {
    *("AddBackward", "CatBackward", "CloneBackward", "StackBackward", "ToCopyBackward"),
    *(_MULTIPLIED, _DIVIDED),
}
_MOST_NODES = 16
# This rank's part of a DTensor.
_LOCAL = "_ToTorchTensorBackward"
# Why a root is no loss by itself: it was divided at last, and may be a share of one.
_QUOTIENT = "quotient"
# What a node knows of its begin, also once its tensors are freed.
_SIZES = "_saved_self_sym_sizes"


class StepLoss:
    """What the backward of a step begins at."""

    def __init__(self) -> None:
        # Whether it was asked for at all, and why the last step that was asked gave none.
        self.asked, self.missing = False, ""
        self._loss: tuple[int, Any] | None = None
        # The step of the forward that was asked, and its number; the backwards since then.
        self._asked_in = self._asked = self._backwards = 0
        # Whether gradients are those of one rank, or their mean over ranks.
        self._averages = False
        # How many quotients were added up in this step, and in the last one of such.
        self._shares = self._usual_shares = 0

    def ask(self, steps: StepNumbers, *, divided: bool, averages: bool) -> None:
        """A forward of a step has ended whose loss is to be read.

        *divided*: the model was given the number to divide its loss by. *averages*: as above.
        """
        self.asked = True
        self._asked_in, self._asked = steps.count, steps.work.forwards
        self._backwards = self._shares = 0
        self._loss, self._averages = None, averages
        # A share of a mean over all ranks is no loss of this one.
        self.missing = "divided_loss" if divided else "no_loss"

    def is_of(self, steps: StepNumbers) -> bool:
        """Whether the step of the forward that was asked is still open."""
        return steps.count == self._asked_in

    def read_roots(self, roots: tuple[Any, ...], steps: StepNumbers) -> bool:
        """Keep what a backward begins at; true if more of this step are to be read."""
        self._backwards += 1
        # Each of several batches has a forward of its own, be they forwarded by turns or at once.
        if self._backwards > steps.work.forwards - self._asked + 1:
            self._miss("several_losses")
            return False
        if self._backwards > 1 and not self._shares:
            return False
        number, missing = _begun_at(roots[0] if len(roots) == 1 else None)
        if missing == _QUOTIENT and self._averages:
            # The step makes smaller what the roots of all its batches add up to.
            self._shares += 1
            before = self._loss[1] if self._loss is not None and self._shares > 1 else 0.0
            self._keep(before + number)
        elif missing or self._shares:
            self._miss("scaled_loss" if missing in ("", _QUOTIENT) else missing)
        else:
            self._keep(number)
        return True

    def _keep(self, number: Any) -> None:
        self.missing, self._loss = "", (self._asked_in, number)

    def _miss(self, why: str) -> None:
        self.missing, self._loss, self._shares = why, None, 0

    def pop(self) -> tuple[int, Any] | None:
        """The loss to record, and the number of steps before its own."""
        found, self._loss = self._loss, None
        if found is not None and self._shares:
            # A step of fewer batches, as the last one of an epoch, has a part of a loss.
            usual, self._usual_shares = self._usual_shares, self._shares
            return found if self._shares >= usual else None
        return found


def _begun_at(root: Any) -> tuple[Any, str]:
    """The number at this root of a backward, and why it is no loss.

    By how much it was multiplied is not known any more: autograd has freed what that node has kept.
    """
    # One of a subclass of tensors may be a part of a loss, or its copies a collective. One element
    # of a vector may be anything: what a critic thinks of a state, say.
    if type(root) is not torch.Tensor or root.dim() or not root.is_floating_point():
        return None, "no_loss"
    why, node, passed = "", root.grad_fn, 0
    while node is not None and passed < _MOST_NODES:
        kind = node.name().rstrip("0123456789")
        if kind == _LOCAL:
            return None, "no_loss"
        # `(loss / 4).mean()` is as scaled as `loss / 4`.
        before = [each for each, _ in node.next_functions if each is not None]
        is_one = kind in _ONE_TO_ONE or prod(getattr(node, _SIZES, (0,))) == 1
        if len(before) != 1 or not is_one:
            break
        if kind == _MULTIPLIED:
            why = "scaled_loss"
        elif kind == _DIVIDED:
            why = why or _QUOTIENT
        (node,) = before
        passed += 1
    return _kept(root), why


def _kept(loss: torch.Tensor) -> Any:
    """Its number, or a copy: the loop may change the loss in place, and a device has none yet."""
    # Traced by `make_fx` it raises.
    number = errors.attempt(loss.item, None) if loss.device.type == "cpu" else None
    return loss.detach().clone() if number is None else number
