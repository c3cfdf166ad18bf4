"""Tracks which forwards and backwards are open, and finds the optimizer that ends a step."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

from otel_ddp import errors
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.inspection import times_called

# Private in torch, so looked up by name. Without them, a backward that raises is not noticed.
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_RUN_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", 0)


def outside_of_backward() -> bool:
    """Whether this thread certainly does no work of a backward."""
    return current_backward() == -1


def is_another_thread(owner: int, thread: int) -> bool:
    """Whether *owner* is a living thread other than *thread*; *owner* is 0 if there is none yet."""
    if owner in (0, thread):
        return False
    return any(each.ident == owner for each in threading.enumerate())


def _backward_runs() -> bool:
    """Whether any thread runs a backward: it then waits in autograd's `_engine_run_backward`."""
    if not _RUN_BACKWARD:
        return True
    return any(times_called(frame, _RUN_BACKWARD) for frame in sys._current_frames().values())


class OpenCalls:
    """The open calls of models. It has plain attributes, as hooks read them in each step."""

    def __init__(self, progress: Progress) -> None:
        self._steps, self._progress = progress.steps, progress
        phases = progress.phases
        self._leave = phases.leave
        # One phase object per kind is enough, as no phase is nested in itself.
        self.forward = phases.of_hooks("forward")
        self.eval = phases.of_hooks("eval")
        self.backward = phases.of_hooks("backward")
        self.wait = phases.of_hooks("comm_wait")
        self.load = phases.of_hooks("data")
        # Depth of nested forwards of watched models, and whether the outermost one trains.
        self.forwards, self.trains = 0, False
        # Whether a backward is open (of all models, at most one is); and autograd's id of it.
        self.in_backward, self.backward_id = False, -1
        # The thread of the last forward, also in an evaluation; `Progress.thread` is the thread of
        # the last training forward.
        self.forward_thread = 0

    def is_outside_step(self, thread: int, trains: bool = True) -> bool:
        """Whether a call that begins in this thread lies outside of the measured steps.

        *trains*: whether the call is a part of training rather than of an evaluation.
        """
        if self.in_backward:
            # Other threads are outside, even an autograd thread that recomputes a forward.
            return is_another_thread(self._progress.thread, thread) and _backward_runs()
        if self.forwards:
            # Training takes precedence: a training forward replaces an open forward of an
            # evaluation in another thread (an actor or evaluator).
            another = is_another_thread(self.forward_thread, thread)
            return another and (self.trains or not trains)
        if trains or not self._steps.in_step:
            return False
        return is_another_thread(self._progress.thread, thread)

    def forward_in_another_thread(self) -> bool:
        """Whether another thread is in a watched model: this thread may then run a part of it."""
        return self.forwards > 0 and is_another_thread(self.forward_thread, threading.get_ident())

    def backward_has_raised(self) -> bool:
        """Whether the open backward has raised: a gradient now arrives in another backward that is
        not nested in it."""
        if current_backward() == self.backward_id:
            return False
        if threading.get_ident() != self._progress.thread:
            return False
        return times_called(sys._getframe(), _RUN_BACKWARD) == 1

    # -- cleanup after exceptions

    def close_forward(self) -> None:
        """End a forward that Ctrl-C or sys.exit has left: torch calls no hook then."""
        self.forwards = 0
        self._leave(self.forward)
        self._leave(self.eval)

    def close_failed_backward(self) -> None:
        """End a backward that has raised, as no hook reports that; leave a running one open."""
        if outside_of_backward():
            self.close_backward()

    def close_backward(self) -> None:
        """End a backward, and the forwards inside it."""
        self.in_backward = False
        self.forwards = 0
        self._leave(self.backward)


# -- the hook on the outputs of models, which marks the start of a backward

# A private method of torch's graph nodes, through which `Tensor.register_hook` works.
_REGISTER = "_register_hook_dict"
_KEY = "otel_ddp"


def _nothing(gradient: torch.Tensor) -> None:
    pass


class BackwardHook:
    """The hook that all outputs of all forwards share.

    It calls a function when a gradient arrives at an output, and does not change the output.
    """

    def __init__(self) -> None:
        # This tensor only carries the hook: torch lets a graph node take over a tensor's hooks.
        self._tensor = torch.empty(0, requires_grad=True)
        self._hooks: OrderedDict[str, Any] = OrderedDict()
        self._tensor._backward_hooks = self._hooks
        self.hook: Callable[[torch.Tensor], None] = _nothing

    def call(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call this function from now on, also from nodes that have the hook already."""
        self.hook = self._hooks[_KEY] = hook

    def take_off(self) -> None:
        """Stop calling the function."""
        self.call(_nothing)

    def put_on(self, output: torch.Tensor, node: Any) -> None:
        """Like `output.register_hook(self.hook)`, but three times faster. *node*: its `grad_fn`."""
        if node is None:
            return  # such as a parameter, which would get one more hook in each forward
        # Put the hook on only once: a model may return the same stored output each time.
        if (marks := getattr(node, "metadata", None)) is not None:
            if self in marks:
                return
            marks[self] = True
        if (register := getattr(node, _REGISTER, None)) is not None:
            register(self._tensor)
        else:
            output.register_hook(self.hook)


# -- which optimizer's step ends a training step

# If the optimizer that ends training steps makes no step while another one makes this many steps
# and there are as many backwards, the other one takes its place.
_PATIENCE = 10


class StepEnd:
    """Finds the optimizer whose step ends a training step: the user's choice, or the first one that
    steps."""

    def __init__(self) -> None:
        # Whether a model is watched. Without one there are no training steps.
        self.has_model = False
        # Backwards since the last training step.
        self.backwards = 0
        self.has_scaler = False
        # Whether the optimizer has stepped since the scaler's last update.
        self.stepped_since_update = False
        # The id of the optimizer that ends training steps -> a weak reference to it. Empty while
        # unknown, and once the optimizer is gone. A step of another optimizer (a GAN has two) is a
        # part of the current training step.
        self.known: dict[int, Callable[[], torch.optim.Optimizer | None]] = {}
        self._named = False
        # Id of another optimizer -> its steps since the last training step; and the number of that
        # training step.
        self._others: dict[int, int] = {}
        self._others_after = 0
        # How many training steps were missed until the current optimizer was found to end them.
        self.missed = 0
        # Since the last training step: how many backwards had run at the latest optimizer step; and
        # how many losses there were. An optimizer step with new backwards before it has a loss of
        # its own (a GAN has two).
        self._stepped_after = self._losses = 0
        # Whether a step had more than one loss since this optimizer was chosen.
        self.several_losses = False

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that ends training steps, if one is known and alive."""
        return next((known() for known in list(self.known.values())), None)

    def choose(self, optimizer: torch.optim.Optimizer, named: bool = False) -> None:
        """From now on, this optimizer ends training steps. *named*: the user has chosen it."""
        self._named = named
        self._losses, self.several_losses = 0, False
        known: dict[int, Any] = {}
        # A weak reference, as an optimizer's state may fill most of a device's memory. The callback
        # must not be a Python function: an exception that a signal handler raises in one would be
        # lost.
        known[id(optimizer)] = errors.attempt(
            lambda: ref(optimizer, partial(known.pop, id(optimizer))), lambda: None
        )
        self.known = known

    def model_came(self, found: bool = False) -> None:
        """A model is new, or instrumented again: another optimizer may end its training steps.

        *found*: whether discovery found the model. If so, keep an optimizer that is still alive, as
        the model may be one of several that train together.
        """
        self.has_model = True
        if not (self._named or (found and self.optimizer is not None)):
            self.known = {}

    def ended_by(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        """Whether this optimizer's step, which is over, ends training step number *steps* + 1."""
        self._losses += self.backwards > self._stepped_after
        self._stepped_after = self.backwards
        self.missed = 0
        if id(optimizer) not in self.known:
            made = self.another_stepped(optimizer, steps)
            if min(self.backwards, made) < _PATIENCE or self._named:
                return False
            self.choose(optimizer)
            self.missed = made - 1
        self.stepped_since_update = True
        return True

    def another_stepped(self, optimizer: torch.optim.Optimizer, steps: int) -> int:
        """Another optimizer has stepped; returns how many steps it made in this training step."""
        if steps != self._others_after:
            self._others, self._others_after = {}, steps
        made = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
        return made

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer ends training steps."""
        return id(optimizer) in self.known

    def scaler_skips(self, found: Any) -> bool:
        """Whether the scaler, about to be updated, has skipped our optimizer's step.

        *found*: optimizer id -> the inf checks since the scaler's last update. If our optimizer is
        not in it, another one is updated, as in a GAN. Values on a device are not read, as that
        would synchronize.
        """
        let, self.stepped_since_update = self.stepped_since_update, False
        took_part = not isinstance(found, dict) or any(each in found for each in self.known)
        return not let and (took_part or not self.known)

    def step_ended(self) -> None:
        """A training step has ended."""
        self.several_losses |= self._losses > 1
        self.backwards = self._stepped_after = self._losses = 0


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """The step count in the optimizer's own state, including steps before a checkpoint; at least 1.

    Optimizers like Adam count their steps. A count on a device is not read, as that would
    synchronize.
    """
    count: Any = next((state["step"] for state in optimizer.state.values() if "step" in state), 1)
    on_host = type(count) is torch.Tensor and count.device.type == "cpu" and count.numel() == 1
    return max(1, int(count)) if on_host or isinstance(count, int) else 1
