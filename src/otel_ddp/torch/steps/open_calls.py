"""Knows which forwards and backward are open, in which threads, and whose call a new one is."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from otel_ddp.recording.progress import Progress
from otel_ddp.torch.inspection import times_called

# Private, and looked up by name: a torch without one of them loses only what needs it.
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_RUN_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", 0)


def outside_of_backward() -> bool:
    """Whether this thread surely does no work of a backward."""
    return current_backward() == -1


def is_another_thread(owner: int, thread: int) -> bool:
    """Whether the owner is another thread than this one, and is still alive. 0: no owner yet."""
    if owner in (0, thread):
        return False
    return any(each.ident == owner for each in threading.enumerate())


def _backward_runs() -> bool:
    """Whether a thread is in a backward: the one that has called it waits in there."""
    if not _RUN_BACKWARD:
        return True
    return any(times_called(frame, _RUN_BACKWARD) for frame in sys._current_frames().values())


class OpenCalls:
    """The calls of models that are open now. Plain attributes, for hooks read them in each step."""

    def __init__(self, progress: Progress) -> None:
        self._steps, self._progress = progress.steps, progress
        phases = progress.phases
        self._leave = phases.leave
        # Phases of ours, one each: none of them is ever inside itself.
        self.forward = phases.of_hooks("forward")
        self.eval = phases.of_hooks("eval")
        self.backward = phases.of_hooks("backward")
        self.wait = phases.of_hooks("comm_wait")
        self.load = phases.of_hooks("data")
        # Forwards of watched models, one inside the other, and whether the outermost one trains.
        self.forwards, self.trains = 0, False
        # One backward at a time, of whatever models, and the number that autograd gave to it.
        self.in_backward, self.backward_id = False, -1
        self.forward_thread = 0
        """The thread of the last forward; that of the last training forward is in the progress."""

    def is_beside_step(self, thread: int, trains: bool = True) -> bool:
        """Whether what begins in this thread is no part of what is measured.

        *trains*: whether it belongs to training, as all does but an evaluation.
        """
        if self.in_backward:
            # Also what a backward computes again in one of autograd's threads.
            return is_another_thread(self._progress.thread, thread) and _backward_runs()
        if self.forwards:
            # Training comes first: the forward of an actor or an evaluator is given up for it.
            another = is_another_thread(self.forward_thread, thread)
            return another and (self.trains or not trains)
        if trains or not self._steps.in_step:
            return False
        return is_another_thread(self._progress.thread, thread)

    def forward_in_another_thread(self) -> bool:
        """Whether another thread is in a watched model: this one may be calling parts of it."""
        return self.forwards > 0 and is_another_thread(self.forward_thread, threading.get_ident())

    def backward_has_raised(self) -> bool:
        """Whether this gradient is of another backward than the open one, and not inside of it."""
        if current_backward() == self.backward_id:
            return False
        if threading.get_ident() != self._progress.thread:
            return False
        return times_called(sys._getframe(), _RUN_BACKWARD) == 1

    # -- what was left open

    def close_forward(self) -> None:
        """End a forward that Ctrl-C or sys.exit has left: torch calls no hook then."""
        self.forwards = 0
        self._leave(self.forward)
        self._leave(self.eval)

    def close_what_raised(self) -> None:
        """End a backward that has raised: only forward has a hook for its end in any case."""
        if outside_of_backward():
            self.close_backward()

    def close_backward(self) -> None:
        """End a backward, and the forwards inside it."""
        self.in_backward = False
        self.forwards = 0
        self._leave(self.backward)


# -- the hook on the outputs of models, at which a backward begins

# What a tensor's own register_hook calls. Private.
_REGISTER = "_register_hook_dict"
_KEY = "otel_ddp"


def _nothing(gradient: torch.Tensor) -> None:
    pass


class BackwardHook:
    """One hook for all outputs of all forwards: each node of the graph refers to the same one.

    It calls a function at the first gradient of a backward, and leaves the outputs alone.
    """

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
