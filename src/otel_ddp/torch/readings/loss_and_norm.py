"""Reads the loss of a step, and the norm of its gradients, without a collective."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch

from otel_ddp import errors
from otel_ddp.torch import inspection
from otel_ddp.torch.steps.open_step import Seen
from otel_ddp.torch.steps.watched_model import WatchedModel

# How much of a tuple is searched for a loss.
_MOST_RETURNED = 16
_SCALING = ("MulBackward", "DivBackward")
# Such a node makes one number of one number; so does one that was given a single one.
_ONE_TO_ONE = ("AddBackward", "CloneBackward", "ToCopyBackward")
_MOST_NODES = 16
# What a node knows of its begin, also once its tensors are freed.
_SIZES = "_saved_self_sym_sizes"
# Private, and looked up by name: a torch without one of them loses only what needs it.
_functorch = getattr(torch._C, "_functorch", None)


class StepLoss:
    """What the last forward that was asked has returned, or what its backward began at."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a forward was asked at all."""
        self.missing = ""
        """Why the last forward gave no loss; empty where it gave one."""
        self.of_backward = False
        """Whether the last one was none that a model has returned."""
        self._loss: tuple[int, Any] | None = None
        # The step of the forward that was asked, its number, and the backwards of that step since.
        self._asked_in = self._asked = self._backwards = 0

    def read(self, watched: WatchedModel, output: Any, seen: Seen) -> None:
        """Keep what this forward returns."""
        self.asked = True
        self.of_backward = False
        self._asked_in, self._asked, self._backwards = seen.steps, seen.forwards, 0
        # A share of a mean over all ranks is no loss of this one.
        loss = None if watched.divided_loss else loss_of(output)
        self.missing = "divided_loss" if watched.divided_loss else "no_loss" if loss is None else ""
        if loss is not None:
            self._loss = seen.steps, loss

    def is_of(self, seen: Seen) -> bool:
        """Whether the step of the forward that was asked is still open."""
        return seen.steps == self._asked_in

    def read_roots(self, roots: tuple[Any, ...], seen: Seen) -> bool:
        """Keep what a backward begins at: the model has returned no loss.

        True if more backwards of this step are to be read.
        """
        self.of_backward = True
        if not roots:
            return True  # `torch.autograd.grad`, as a penalty of gradients calls it first
        self._backwards += 1
        if self._backwards == 1:
            self._read_first(roots, seen.steps)
            return True
        # Each of several batches has a forward of its own, be they forwarded by turns or at once.
        if self._backwards > seen.forwards - self._asked + 1:
            self._loss = None
            self.missing = "several_losses"
        return False

    def _read_first(self, roots: tuple[Any, ...], steps_before: int) -> None:
        # One of a subclass of tensors may be a part of a loss, or its copies a collective.
        if len(roots) != 1 or type(roots[0]) is not torch.Tensor or not _may_be_a_loss(roots[0]):
            return
        if _is_scaled(roots[0]):
            self.missing = "scaled_loss"
            return
        self.missing = ""
        self._loss = steps_before, _kept(roots[0])

    def pop(self) -> tuple[int, Any] | None:
        """The loss to record, and the number of steps before its own."""
        found, self._loss = self._loss, None
        return found


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


def loss_of(output: Any) -> Any:
    """The loss in what a model returns; None where there is none, or more than one may be it."""
    kind = type(output)
    loss: Any
    if issubclass(kind, torch.Tensor):
        loss = output if len(inspection.of_tensor(output, "shape")) == 0 else None
    elif issubclass(kind, dict) or inspection.maps(kind):
        loss = dict(inspection.items(output)).get("loss")
    else:
        loss = inspection.attributes(output).get("loss")
        if loss is None and issubclass(kind, tuple | list):
            # `return logits, loss`
            each = (tuple if issubclass(kind, tuple) else list).__iter__(output)
            scalars = [one for one in islice(each, _MOST_RETURNED) if _may_be_a_loss(one)]
            loss = scalars[0] if len(scalars) == 1 else None
    # A user's subclass of a tensor would be copied by the user's code.
    if not _is_torchs(loss) or loss.numel() != 1 or _is_batched(loss):
        return None
    return _kept(loss)


def _may_be_a_loss(value: Any) -> bool:
    """Whether it is a single number that backward may begin at."""
    return (
        _is_torchs(value)
        # One element of a vector may be anything: what a critic thinks of a state, say.
        and value.dim() == 0
        and value.is_floating_point()
        and bool(value.requires_grad)
    )


def _is_scaled(root: torch.Tensor) -> bool:
    """Whether the last that was done to it may be a scaler's, or a share of several batches.

    By how much is not known any more: autograd has freed what this node has kept.
    """
    node: Any = root.grad_fn
    for _ in range(_MOST_NODES):
        if node is None:
            return False
        kind = node.name().rstrip("0123456789")
        if kind in _SCALING:
            return True
        # `(loss / 4).mean()` is as scaled as `loss / 4`.
        before = [each for each, _ in node.next_functions if each is not None]
        is_one = kind in _ONE_TO_ONE or prod(getattr(node, _SIZES, (0,))) == 1
        if len(before) != 1 or not is_one:
            return False
        node = before[0]
    return False


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
