"""Reads the loss of a step: the number at which its backward begins."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.recording.recorder import Recorder

# So long a loss that backward begins at is kept back: most loops log theirs by then, by that name.
_STEPS_TO_KEEP_BACK = 200
# At most so long: people look for a curve.
_NS_TO_KEEP_BACK = 120 * 10**9
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

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._steps = recorder, recorder.steps
        # Whether it was asked for at all, and why the last step that was asked gave none.
        self.asked, self.missing = False, ""
        self._loss: tuple[int, Any] | None = None
        # The losses, their steps, and when they were read.
        self._kept_back: list[tuple[Any, int, int]] = []
        # The step of the forward that was asked.
        self._asked_in = 0
        # Whether gradients are those of one rank, or their mean over ranks.
        self._averages = False
        # How many quotients were added up in this step, and in the last one of such.
        self._shares = self._usual_shares = 0

    def ask(self, averages: bool) -> None:
        """A forward of a step has ended whose loss is to be read. *averages*: as above."""
        self.asked, self.missing = True, "no_loss"
        self._asked_in, self._averages = self._steps.count, averages
        self._loss, self._shares = None, 0

    @property
    def is_of_step(self) -> bool:
        """Whether the step of the forward that was asked is still open."""
        return self._steps.count == self._asked_in

    def read_roots(self, roots: tuple[Any, ...]) -> bool:
        """Keep what a backward begins at; true if that of the step's next one is to be added."""
        number, missing = _begun_at(roots[0] if len(roots) == 1 else None)
        if is_share := missing == _QUOTIENT and self._averages:
            # Each batch contributes its quotient: their sum is the loss of the step.
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
            # A step of fewer batches, as the last one of an epoch, has a part of a loss.
            usual, self._usual_shares = self._usual_shares, self._shares
            return found if self._shares >= usual else None
        return found

    @errors.contained()
    def offer(self, several: bool) -> None:
        """Between steps: record what was read, once that is due. *several*: a step has several."""
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
        """Record what was kept back."""
        losses, self._kept_back = self._kept_back, []
        for loss, number, read_ns in losses:
            self._recorder.record_reading({"loss": loss}, number, read_ns)


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
        is_one = kind in _ONE_TO_ONE or math.prod(getattr(node, _SIZES, (0,))) == 1
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
