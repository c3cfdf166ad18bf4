"""The hook on the outputs of models, at which a backward begins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

# What a tensor's own register_hook calls. Private.
_REGISTER = "_register_hook_dict"
_KEY = "otel_ddp"


def _nothing(gradient: torch.Tensor) -> None:
    pass


class BackwardHook:
    """One hook for all outputs of all forwards: each node of the graph refers to the same one.

    It calls a function at the first gradient of a backward, and leaves the outputs alone.
    """

    __slots__ = ("_hooks", "_tensor", "hook")

    def __init__(self) -> None:
        # Nodes take the hooks of a tensor: of this one, which is no output of any model.
        self._tensor = torch.empty(0, requires_grad=True)
        self._hooks: OrderedDict[str, Any] = OrderedDict()
        self._tensor._backward_hooks = self._hooks
        self.hook: Callable[[torch.Tensor], None] = _nothing

    def call(self, hook: Callable[[torch.Tensor], None]) -> None:
        """From here on call this function, also from the nodes that have the hook already."""
        self.hook = self._hooks[_KEY] = hook

    def take_off(self) -> None:
        """From here on call nothing."""
        self.call(_nothing)

    def put_on(self, output: torch.Tensor, node: Any) -> None:
        """`output.register_hook(self.hook)` at a third of its price; *node* is its `grad_fn`."""
        if node is None:
            return  # a parameter lives on: it would get one more hook at each forward
        # A model may return the same output each time, one that it keeps.
        if (marks := getattr(node, "metadata", None)) is not None:
            if self in marks:
                return
            marks[self] = True
        if (register := getattr(node, _REGISTER, None)) is not None:
            register(self._tensor)
        else:
            output.register_hook(self.hook)
