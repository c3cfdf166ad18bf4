"""Reads the loss of a step: the number at which its backward begins."""

from __future__ import annotations

from itertools import islice
from math import prod
from typing import Any

import torch

from otel_ddp import errors
from otel_ddp.torch.hooks.model import differentiable
from otel_ddp.torch.steps.stepper import Seen
from otel_ddp.torch.steps.watched_model import WatchedModel

# How many of the numbers that a model returns are noted, and where their nodes keep them.
_MOST_RETURNED = 16
_NOTED = "otel_ddp loss"
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
# Private, and looked up by name: a torch without one of them loses only what needs it.
_functorch = getattr(torch._C, "_functorch", None)


class StepLoss:
    """What the backward of a step begins at: a number that the model has returned, or another."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a forward was asked at all."""
        self.missing = ""
        """Why the last step that was asked gave no loss; empty where it gave one."""
        self.of_backward = False
        """Whether the last one was none that a model has returned."""
        self._loss: tuple[int, Any] | None = None
        # The step of the forward that was asked, and its number; then what has followed it in this
        # step.
        self._asked_in = self._asked = self._backwards = self._gradients = 0
        # Whether gradients are those of one rank, or their mean over ranks.
        self._averages = False
        # How many quotients were added up in this step, and in the last one of such.
        self._shares = self._usual_shares = 0
        # The numbers of the forward that was asked, and which of them was the loss the last time.
        self._numbers: list[Any] = []
        self._place = -1

    def read(self, watched: WatchedModel, output: Any, seen: Seen, world_size: int) -> None:
        """Note the numbers of what this forward returns: backward may begin at one of them."""
        self.asked = True
        self.of_backward = False
        self._asked_in, self._asked = seen.steps, seen.forwards
        self._backwards = self._gradients = self._shares = 0
        self._loss = None
        self._averages = world_size == 1 or watched.is_ddp
        # A share of a mean over all ranks is no loss of this one.
        self.missing = "divided_loss" if watched.divided_loss else "no_loss"
        self._numbers = note_numbers(output) if self.missing == "no_loss" else []

    def is_of(self, seen: Seen) -> bool:
        """Whether the step of the forward that was asked is still open."""
        return seen.steps == self._asked_in

    def read_roots(
        self, roots: tuple[Any, ...], adds_up: bool, seen: Seen, has_scaler: bool
    ) -> bool:
        """Keep what a backward begins at; true if more of this step are to be read.

        *adds_up*: it is one of `backward`, not of `torch.autograd.grad`. *has_scaler*: a product
        may be what a scaler makes of a loss.
        """
        # Only a backward that lacks is the end of a program.
        self._numbers = []
        number, missing, place = _begun_at(roots[0] if len(roots) == 1 else None)
        if place >= 0 and missing and not has_scaler:
            # What was returned may be a factor of the loss: a logarithm of a probability, say.
            place = -1
        elif place >= 0:
            missing = ""
        if not adds_up:
            if self._backwards:
                return True
            # A penalty of gradients and an inner loop come before the loss itself.
            self._gradients += 1
            if self._gradients == 1 and place >= 0:
                self._keep(number, place)
            else:
                self._miss("no_loss" if self._gradients == 1 else "several_losses")
            return True
        self._backwards += 1
        # Each of several batches has a forward of its own, be they forwarded by turns or at once.
        if self._backwards > seen.forwards - self._asked + 1:
            self._miss("several_losses")
            return False
        if self._backwards > 1 and not self._shares:
            return False
        if missing == _QUOTIENT and self._averages:
            # The step makes smaller what the roots of all its batches add up to.
            self._shares += 1
            before = self._loss[1] if self._loss is not None and self._shares > 1 else 0.0
            self._keep(before + number, place)
        elif missing or self._shares:
            self._miss("scaled_loss" if missing in ("", _QUOTIENT) else missing)
        else:
            self._keep(number, place)
        return True

    def _keep(self, number: Any, place: int) -> None:
        self.missing, self.of_backward, self._place = "", place < 0, place
        self._loss = self._asked_in, number

    def _miss(self, why: str) -> None:
        self.missing, self.of_backward, self._loss = why, True, None
        self._shares, self._place = 0, -1

    def pop(self, ends: bool = False) -> tuple[int, Any] | None:
        """The loss to record, and the number of steps before its own.

        *ends*: the run ends. A program that ends because its loss is lost calls no backward.
        """
        found, self._loss = self._loss, None
        if ends and found is None and 0 <= self._place < len(self._numbers):
            return self._asked_in, self._numbers[self._place]
        if found is not None and self._shares:
            # A step of fewer batches, as the last one of an epoch, has a part of a loss.
            usual, self._usual_shares = self._usual_shares, self._shares
            return found if self._shares >= usual else None
        return found


def note_numbers(output: Any) -> list[Any]:
    """The single numbers of what a model returns; noted in their nodes, so they hold no graph."""
    numbers: list[Any] = []
    for each in islice(filter(_is_number, differentiable(output)), _MOST_RETURNED):
        noted = getattr(each.grad_fn, "metadata", None)
        if noted is not None and not _is_batched(each):
            noted.setdefault(_NOTED, {})[each.output_nr] = len(numbers), (number := _kept(each))
            numbers.append(number)
    return numbers


def _is_number(value: Any) -> bool:
    # A user's subclass of a tensor would be copied by the user's code.
    return _is_torchs(value) and value.numel() == 1 and value.is_floating_point()


def _begun_at(root: Any) -> tuple[Any, str, int]:
    """The number at this root of a backward, why it is no loss, and its place.

    The place is that among the numbers that the model has returned, -1 if it is none of them.

    By how much it was multiplied is not known any more: autograd has freed what that node has kept.
    """
    if not _is_torchs(root):
        return None, "no_loss", -1
    why, node, output, passed = "", root.grad_fn, root.output_nr, 0
    while node is not None and passed < _MOST_NODES:
        if output in (noted := node.metadata.get(_NOTED, {})):
            place, number = noted[output]
            # Something may have been added to it.
            multiplied = "scaled_loss" if why == "scaled_loss" else ""
            return (_kept(root) if passed and not why else number), multiplied, place
        kind = node.name().rstrip("0123456789")
        if kind == _LOCAL:
            return None, "no_loss", -1
        # `(loss / 4).mean()` is as scaled as `loss / 4`.
        before = [each for each in node.next_functions if each[0] is not None]
        is_one = kind in _ONE_TO_ONE or prod(getattr(node, _SIZES, (0,))) == 1
        if len(before) != 1 or not is_one:
            break
        if kind == _MULTIPLIED:
            why = "scaled_loss"
        elif kind == _DIVIDED:
            why = why or _QUOTIENT
        ((node, output),) = before
        passed += 1
    # One of a subclass of tensors may be a part of a loss, or its copies a collective. One element
    # of a vector may be anything: what a critic thinks of a state, say.
    if type(root) is not torch.Tensor or root.dim() or not root.is_floating_point():
        return None, "no_loss", -1
    return _kept(root), why, -1


def _kept(loss: torch.Tensor) -> Any:
    """Its number, or a copy: the loop may change the loss in place.

    Of a tensor on a device the number is not there yet. Other kinds of tensors may have none, or
    one that is not the loss: of a DTensor it may be this rank's part.
    """
    number = None
    if type(loss) is torch.Tensor and loss.device.type == "cpu":
        # Traced by `make_fx` it raises.
        number = errors.attempt(loss.item, None)
    return loss.detach().clone() if number is None else number


def _is_batched(value: Any) -> bool:
    """Whether it is one number of each sample, inside of `vmap`."""
    while _functorch is not None and _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False


def _is_torchs(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, torch.Tensor) and str(kind.__module__).partition(".")[0] == "torch"
