"""Reads the loss of a step: the tensor on which the loop calls `backward`."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.recorder import Recorder

# The losses read here are withheld for this many steps. Within them most loops log a loss of their
# own, which is then recorded instead.
_STEPS_TO_WITHHOLD = 200
# Losses are withheld no longer than this, as users want to see a curve soon.
_NS_TO_WITHHOLD = 120 * 10**9
_ADDED, _MULTIPLIED, _DIVIDED = "AddBackward", "MulBackward", "DivBackward"
_SUMS = (_ADDED, "SubBackward")
# Autograd nodes of these kinds turn one number into one number, if they have one input. So does any
# node whose input has one element (see `_SIZES`).
_OTHERS = ("CatBackward", "CloneBackward", "StackBackward", "ToCopyBackward")
_ONE_TO_ONE = {_ADDED, _MULTIPLIED, _DIVIDED, *_OTHERS}
_MOST_NODES = 16
# Kind of the autograd node that takes the local part of a DTensor.
_LOCAL = "_ToTorchTensorBackward"
# A reason why the root of a backward may be only a share of the loss: it is a quotient, such as
# `loss / 4` with four micro-batches.
_QUOTIENT = "quotient"
# Attribute with the sizes of a node's input, which stays when autograd frees the input itself.
_SIZES = "_saved_self_sym_sizes"


class StepLoss:
    """Reads losses of steps from the roots of backwards, and withholds them at first."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._steps = recorder, recorder.steps
        # Whether a loss was ever requested, and why the last request found none.
        self.requested, self.missing = False, ""
        self._loss: tuple[int, Any] | None = None
        # Withheld losses, with their step and the time of reading.
        self._withheld: list[tuple[Any, int, int]] = []
        # The step in which the loss was requested.
        self._requested_in = 0
        # Whether the quotients of a step add up to its loss. They do with one rank, or if gradients
        # are averaged over ranks: then each quotient divides by the number of micro-batches.
        self._averages = False
        # How many quotients were added up in this step, and in the last step that had any.
        self._shares = self._usual_shares = 0

    def request(self, averages: bool) -> None:
        """Request the loss of the forward that has ended. *averages*: see `_averages`."""
        self.requested, self.missing = True, "no_loss"
        self._requested_in, self._averages = self._steps.count, averages
        self._loss, self._shares = None, 0

    @property
    def is_of_step(self) -> bool:
        """Whether the step in which the loss was requested is still open."""
        return self._steps.count == self._requested_in

    def read_roots(self, roots: tuple[Any, ...]) -> bool:
        """Read the loss at a backward's roots; True if the next backward may add a share to it."""
        number, missing = _loss_at(roots[0] if len(roots) == 1 else None)
        if is_share := missing == _QUOTIENT and self._averages:
            # Each micro-batch contributes a quotient; the loss of the step is their sum.
            before = self._loss[1] if self._loss is not None else 0.0
            self._shares += 1
            self._keep(before + number)
        elif missing or self._shares:
            self._loss, self._shares = None, 0
            self.missing = missing if missing == "no_loss" else "scaled_loss"
        else:
            self._keep(number)
        return is_share

    def _keep(self, number: Any) -> None:
        self.missing, self._loss = "", (self._requested_in, number)

    def _pop(self) -> tuple[int, Any] | None:
        """The loss to record, and how many steps had ended before the loss's own step."""
        found, self._loss = self._loss, None
        if found is not None and self._shares:
            # With fewer micro-batches than in the last step, as at the end of an epoch, the sum is
            # only a part of the loss: drop it.
            usual, self._usual_shares = self._usual_shares, self._shares
            return found if self._shares >= usual else None
        return found

    @errors.contained()
    def offer(self, several: bool) -> None:
        """Between steps: withhold the new loss, and record withheld losses once they are due.

        *several*: steps have several losses, so none is used.
        """
        found = self._pop()
        if several:
            self.missing = "several_losses"
        elif found is not None:
            steps_before, loss = found
            since = self._steps.count - steps_before - 1
            number = self._steps.logged_number - since
            self._withheld.append((loss, max(0, number), time.time_ns()))
        withheld_ns = time.time_ns() - self._withheld[0][2] if self._withheld else 0
        if self._steps.count >= _STEPS_TO_WITHHOLD or withheld_ns >= _NS_TO_WITHHOLD:
            self.record()

    def record(self) -> None:
        """Record the withheld losses."""
        losses, self._withheld = self._withheld, []
        for loss, number, read_ns in losses:
            self._recorder.record_reading({"loss": loss}, number, read_ns)


def _loss_at(root: Any) -> tuple[Any, str]:
    """The number at this root of a backward, and why it is not the loss (empty if it is).

    If the root is a product, the loss is unknown, as autograd has freed the factor.
    """
    # A tensor subclass may hold only a part of the loss, and copying it may be a collective. A
    # vector may hold anything, such as a critic's values.
    if type(root) is not torch.Tensor or root.dim() or not root.is_floating_point():
        return None, "no_loss"
    why, node, passed = "", root.grad_fn, 0
    while node is not None and passed < _MOST_NODES:
        kind = _kind(node)
        if kind == _LOCAL:
            return None, "no_loss"
        # Follow nodes that do not change the number: `(loss / 4).mean()` is a quotient as well.
        before = [each for each, _ in node.next_functions if each is not None]
        is_one = kind in _ONE_TO_ONE or math.prod(getattr(node, _SIZES, (0,))) == 1
        if len(before) != 1 or not is_one:
            return _copied(root), why or (_QUOTIENT if _adds_quotients(node, _MOST_NODES) else "")
        if kind == _MULTIPLIED:
            why = "scaled_loss"
        elif kind == _DIVIDED:
            why = why or _QUOTIENT
        (node,) = before
        passed += 1
    return _copied(root), why


def _kind(node: Any) -> str:
    return str(node.name().rstrip("0123456789"))


def _adds_quotients(node: Any, most: int) -> bool:
    """Whether this node is a sum or difference with a quotient in it (`ce / 4 + 0.1 * aux`)."""
    before = [each for each, _ in node.next_functions if each is not None]
    if not most or _kind(node) not in _SUMS:
        return False
    return any(_kind(each) == _DIVIDED or _adds_quotients(each, most - 1) for each in before)


def _copied(loss: torch.Tensor) -> Any:
    """The loss as a number, or on a device as a copy, as the loop may change it in place."""
    # `item` raises under `make_fx`.
    number = errors.attempt(loss.item, None) if loss.device.type == "cpu" else None
    return loss.detach().clone() if number is None else number
