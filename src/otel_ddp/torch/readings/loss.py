"""Reads the loss of a step, at the root of its backward."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.recorder import Recorder

# The loss is withheld for so many steps: by then most loops have logged their own by that name.
_STEPS_TO_KEEP_BACK = 200
# Withheld no longer than this, as people look for a curve.
_NS_TO_KEEP_BACK = 120 * 10**9
_ADDED, _MULTIPLIED, _DIVIDED = "AddBackward", "MulBackward", "DivBackward"
_SUMS = (_ADDED, "SubBackward")
# These autograd nodes turn one number into one number; so does any node with a single input.
_OTHERS = ("CatBackward", "CloneBackward", "StackBackward", "ToCopyBackward")
_ONE_TO_ONE = {_ADDED, _MULTIPLIED, _DIVIDED, *_OTHERS}
_MOST_NODES = 16
# The local part of a DTensor.
_LOCAL = "_ToTorchTensorBackward"
# The reason why a graph's root may be a share of the loss: it is a quotient (`loss / 4`).
_QUOTIENT = "quotient"
# The sizes of a node's input, also available after its tensors are freed.
_SIZES = "_saved_self_sym_sizes"


class StepLoss:
    """The loss of a step, from the roots of its backwards."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._steps = recorder, recorder.steps
        # Whether a loss was requested at all, and why the last request found none.
        self.asked, self.missing = False, ""
        self._loss: tuple[int, Any] | None = None
        # Withheld losses, with their step and the time of reading.
        self._kept_back: list[tuple[Any, int, int]] = []
        # The step in which the loss was requested.
        self._asked_in = 0
        # Whether gradients belong to one rank or are averaged, so that a sum of quotients is the
        # loss.
        self._averages = False
        # Number of quotients added up in this step, and in the last step that had some.
        self._shares = self._usual_shares = 0

    def ask(self, averages: bool) -> None:
        """A forward has ended whose loss is to be read. *averages*: see `_averages`."""
        self.asked, self.missing = True, "no_loss"
        self._asked_in, self._averages = self._steps.count, averages
        self._loss, self._shares = None, 0

    @property
    def is_of_step(self) -> bool:
        """Whether the step with the request is still open."""
        return self._steps.count == self._asked_in

    def read_roots(self, roots: tuple[Any, ...]) -> bool:
        """Read the loss of one backward; True if the step's next backward adds to it."""
        number, missing = _begun_at(roots[0] if len(roots) == 1 else None)
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
        self.missing, self._loss = "", (self._asked_in, number)

    def _pop(self) -> tuple[int, Any] | None:
        """The loss to record, and the number of steps before its own."""
        found, self._loss = self._loss, None
        if found is not None and self._shares:
            # A step with fewer micro-batches, as at the end of an epoch, has only a part of the
            # loss.
            usual, self._usual_shares = self._usual_shares, self._shares
            return found if self._shares >= usual else None
        return found

    @errors.contained()
    def offer(self, several: bool) -> None:
        """Between steps: record withheld losses once due. *several*: a step has several losses."""
        found = self._pop()
        if several:
            self.missing = "several_losses"
        elif found is not None:
            steps_before, loss = found
            since = self._steps.count - steps_before - 1
            number = self._steps.logged_number - since
            self._kept_back.append((loss, max(0, number), time.time_ns()))
        kept_ns = time.time_ns() - self._kept_back[0][2] if self._kept_back else 0
        if self._steps.count >= _STEPS_TO_KEEP_BACK or kept_ns >= _NS_TO_KEEP_BACK:
            self.record()

    def record(self) -> None:
        """Record the withheld losses."""
        losses, self._kept_back = self._kept_back, []
        for loss, number, read_ns in losses:
            self._recorder.record_reading({"loss": loss}, number, read_ns)


def _begun_at(root: Any) -> tuple[Any, str]:
    """The number at this root of a backward, and why it is not the loss.

    The factor of a product cannot be read: autograd has freed it.
    """
    # A tensor subclass may be a part of the loss, and copying it a collective. An element of a
    # vector may be anything, such as a critic's value.
    if type(root) is not torch.Tensor or root.dim() or not root.is_floating_point():
        return None, "no_loss"
    why, node, passed = "", root.grad_fn, 0
    while node is not None and passed < _MOST_NODES:
        kind = _kind(node)
        if kind == _LOCAL:
            return None, "no_loss"
        # `(loss / 4).mean()` is scaled like `loss / 4`.
        before = [each for each, _ in node.next_functions if each is not None]
        is_one = kind in _ONE_TO_ONE or math.prod(getattr(node, _SIZES, (0,))) == 1
        if len(before) != 1 or not is_one:
            return _kept(root), why or (_QUOTIENT if _adds_quotients(node, _MOST_NODES) else "")
        if kind == _MULTIPLIED:
            why = "scaled_loss"
        elif kind == _DIVIDED:
            why = why or _QUOTIENT
        (node,) = before
        passed += 1
    return _kept(root), why


def _kind(node: Any) -> str:
    return str(node.name().rstrip("0123456789"))


def _adds_quotients(node: Any, most: int) -> bool:
    """Whether a sum or difference has a quotient, as in `ce / 4 + 0.1 * aux`."""
    before = [each for each, _ in node.next_functions if each is not None]
    if not most or _kind(node) not in _SUMS:
        return False
    return any(_kind(each) == _DIVIDED or _adds_quotients(each, most - 1) for each in before)


def _kept(loss: torch.Tensor) -> Any:
    """The number, or a copy of a device's tensor: the loop may change the loss in place."""
    # It raises under `make_fx`.
    number = errors.attempt(loss.item, None) if loss.device.type == "cpu" else None
    return loss.detach().clone() if number is None else number
