"""Knows which optimizer's step ends a training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

from otel_ddp import errors

# Another optimizer ends our steps from here on, once it has stepped so often, with a backward each
# time, while ours did not.
_PATIENCE = 10


class StepEnd:
    """Knows the optimizer whose step ends a training step: named by the user, or the first seen."""

    def __init__(self) -> None:
        self.has_model = False
        """While no model is known, nothing makes a step."""
        self.backwards = 0
        """Backwards since the last step."""
        self.has_scaler = False
        """Whether a scaler says which steps it leaves out."""
        self.scaler_let = False
        """Whether the scaler has let our step be made since its last update."""
        self.known: dict[int, Callable[[], torch.optim.Optimizer | None]] = {}
        """The optimizer whose step ends ours, by its id. Empty while none is known; and once it has
        gone. Any further one (a GAN's second) is part of the next step, and so it is in each."""
        self._named = False
        # How many steps other optimizers have made since our last one, by the id of each; and how
        # many of ours there were by then.
        self._others: dict[int, int] = {}
        self._others_after = 0
        self.missed = 0
        """How many steps were made before it was known that they end ours."""
        # Since our last step: the backwards by the last step of an optimizer, and how many steps of
        # optimizers had backwards just before them. Each of these has a loss of its own.
        self._stepped_after = self._losses = 0
        self.several_losses = False
        """Whether a step has had more than one, since its end is that of this optimizer."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose step ends ours, if one is known and still there."""
        return next((known() for known in list(self.known.values())), None)

    def choose(self, optimizer: torch.optim.Optimizer, named: bool = False) -> None:
        """From here on this optimizer's step ends ours. *named*: the user has named it."""
        self._named = named
        self._losses, self.several_losses = 0, False
        known: dict[int, Any] = {}
        # Weakly: its state may be most of the memory of a device. The callback is no function of
        # Python's: what a signal handler raises in one is lost.
        known[id(optimizer)] = errors.attempt(
            lambda: ref(optimizer, partial(known.pop, id(optimizer))), lambda: None
        )
        self.known = known

    def model_came(self, found: bool = False) -> None:
        """A model has come, or come again: it may have another optimizer than the last one.

        *found*: it was not named, and comes in the place of others, or in one round with them.
        """
        self.has_model = True
        if not (self._named or (found and self.optimizer is not None)):
            self.known = {}

    def ended_by(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        """Whether the step that this optimizer has finished ends ours. *steps*: how many have."""
        self._losses += self.backwards > self._stepped_after
        self._stepped_after = self.backwards
        self.missed = 0
        if id(optimizer) not in self.known:
            made = self.another_stepped(optimizer, steps)
            if min(self.backwards, made) < _PATIENCE or self._named:
                return False
            self.choose(optimizer)
            self.missed = made - 1
        self.scaler_let = True
        return True

    def another_stepped(self, optimizer: torch.optim.Optimizer, steps: int) -> int:
        """An optimizer that does not end ours has made a step; how many since the last of ours."""
        if steps != self._others_after:
            self._others, self._others_after = {}, steps
        made = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
        return made

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer ends our steps."""
        return id(optimizer) in self.known

    def scaler_skips(self, found: Any) -> bool:
        """The scaler is about to be updated: whether it has left our step out.

        *found*: what it has found since its last update, by the id of each optimizer. Each of a
        GAN's two may have an update of its own. It is known on the host; no device is asked.
        """
        let, self.scaler_let = self.scaler_let, False
        took_part = not isinstance(found, dict) or any(each in found for each in self.known)
        return not let and (took_part or not self.known)

    def step_ended(self) -> None:
        """A training step has ended."""
        self.several_losses |= self._losses > 1
        self.backwards = self._stepped_after = self._losses = 0


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """How many steps an optimizer's own state counts, those before a checkpoint too; 1 at least.

    Adam and its like count. A count on a device is not read: that would wait for the device.
    """
    count: Any = next((state["step"] for state in optimizer.state.values() if "step" in state), 1)
    on_host = type(count) is torch.Tensor and count.device.type == "cpu" and count.numel() == 1
    return max(1, int(count)) if on_host or isinstance(count, int) else 1
