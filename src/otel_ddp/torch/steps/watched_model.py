"""What is known of one model whose steps are measured."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class WatchedModel:
    """A model that is watched; found by its id, for a weak dictionary is four times as slow."""

    __slots__ = (
        *("by_samples", "called_past_ddp", "counted", "divided_loss", "flops_per_unit", "forwards"),
        *("found", "inner_hooks", "is_ddp", "model", "samples", "syncs_buffers", "tokens"),
        "trains_in_eval",
    )

    def __init__(self, model: nn.Module, among: dict[int, WatchedModel]) -> None:
        # Never the model itself: most of a device's memory hangs on it. The callback is no function
        # of Python's: what a signal handler raises in one is lost.
        self.model = ref(model, partial(among.pop, id(model)))
        self.found = False
        """Whether it was found, not named."""
        self.called_past_ddp = False
        """Of a module inside DDP: whether it is being called directly."""
        self.inner_hooks: dict[Any, Any] | None = None
        """Of a DDP whose inner module has our hook only for direct calls: that module's hooks."""
        self.syncs_buffers = False
        """Whether it may give every rank the same buffers before a forward."""
        # DDP works as the model inside of it does, and a loop may set the mode of that one alone.
        self.is_ddp = isinstance(model, DistributedDataParallel)
        self.divided_loss = False
        """Whether it was given the number to divide its loss by: the items of all ranks' batches.
        """
        self.trains_in_eval = False
        """Whether it trains in evaluation mode, as a model does that keeps its statistics."""
        self.counted = True
        """Whether the batch of its last forward is the step's."""
        # Forward and backward, for a token, or for a sample where there are no tokens.
        self.flops_per_unit: float | None = None
        """None as long as it is not known, 0 where it never will be."""
        self.by_samples = False
        self.forwards = self.samples = self.tokens = 0
