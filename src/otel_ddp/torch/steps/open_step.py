"""The open calls of a step (forward, backward), and which optimizer's step ends it."""

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

# Private, so looked up by name: without one, only the features that need it are missing.
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_RUN_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", 0)


def outside_of_backward() -> bool:
    """Whether this thread certainly does no work of a backward."""
    return current_backward() == -1


def is_another_thread(owner: int, thread: int) -> bool:
    """Whether the owner is a different thread that is still alive. 0: no owner yet."""
    if owner in (0, thread):
        return False
    return any(each.ident == owner for each in threading.enumerate())


def _backward_runs() -> bool:
    """Whether any thread is in a backward: the calling thread waits in this function."""
    if not _RUN_BACKWARD:
        return True
    return any(times_called(frame, _RUN_BACKWARD) for frame in sys._current_frames().values())


class OpenCalls:
    """The calls of models that are open. Plain attributes, as hooks read them in each step."""

    def __init__(self, progress: Progress) -> None:
        self._steps, self._progress = progress.steps, progress
        phases = progress.phases
        self._leave = phases.leave
        # Our own phases, one each: none is ever nested in itself.
        self.forward = phases.of_hooks("forward")
        self.eval = phases.of_hooks("eval")
        self.backward = phases.of_hooks("backward")
        self.wait = phases.of_hooks("comm_wait")
        self.load = phases.of_hooks("data")
        # Depth of nested forwards of watched models, and whether the outermost one trains.
        self.forwards, self.trains = 0, False
        # One backward at a time, of any model, and its graph task id.
        self.in_backward, self.backward_id = False, -1
        # The thread of the last forward. `Progress.thread` is that of the last training forward.
        self.forward_thread = 0

    def is_outside_step(self, thread: int, trains: bool = True) -> bool:
        """Whether a call that begins in this thread does not belong to the measured steps.

        *trains*: whether it belongs to training rather than an evaluation.
        """
        if self.in_backward:
            # Also for parts that a backward recomputes in an autograd thread.
            return is_another_thread(self._progress.thread, thread) and _backward_runs()
        if self.forwards:
            # Training takes precedence: it replaces an open forward of an actor or evaluator.
            another = is_another_thread(self.forward_thread, thread)
            return another and (self.trains or not trains)
        if trains or not self._steps.in_step:
            return False
        return is_another_thread(self._progress.thread, thread)

    def forward_in_another_thread(self) -> bool:
        """Whether another thread is in a watched model, so that this one may call parts of it."""
        return self.forwards > 0 and is_another_thread(self.forward_thread, threading.get_ident())

    def backward_has_raised(self) -> bool:
        """Whether this gradient belongs to a new backward that is not nested in the open one."""
        if current_backward() == self.backward_id:
            return False
        if threading.get_ident() != self._progress.thread:
            return False
        return times_called(sys._getframe(), _RUN_BACKWARD) == 1

    # -- cleanup after exceptions

    def close_forward(self) -> None:
        """End a forward that was left by Ctrl-C or sys.exit: torch calls no hook then."""
        self.forwards = 0
        self._leave(self.forward)
        self._leave(self.eval)

    def close_what_raised(self) -> None:
        """End a backward that has raised: only forward has a hook that runs after an exception."""
        if outside_of_backward():
            self.close_backward()

    def close_backward(self) -> None:
        """End a backward, and the forwards inside it."""
        self.in_backward = False
        self.forwards = 0
        self._leave(self.backward)


# -- the hook on the outputs of models, which marks the start of a backward

# Private; called by a tensor's own `register_hook`.
_REGISTER = "_register_hook_dict"
_KEY = "otel_ddp"


def _nothing(gradient: torch.Tensor) -> None:
    pass


class BackwardHook:
    """One hook on all outputs of all forwards: all graph nodes share it.

    It calls a function at the first gradient of a backward, and does not change the outputs.
    """

    def __init__(self) -> None:
        # A node copies the hooks of a tensor. This tensor is no model's output.
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
        """`output.register_hook(self.hook)` at a third of the cost; *node* is its `grad_fn`."""
        if node is None:
            return  # a parameter lives on, and would get one more hook in each forward
        # A model may return the same stored output each time.
        if (marks := getattr(node, "metadata", None)) is not None:
            if self in marks:
                return
            marks[self] = True
        if (register := getattr(node, _REGISTER, None)) is not None:
            register(self._tensor)
        else:
            output.register_hook(self.hook)


# -- which optimizer's step ends a training step

# Another optimizer takes over the end of steps after so many steps, each with a backward, while the
# present one made none.
_PATIENCE = 10


class StepEnd:
    """Finds the optimizer whose step ends a training step: the user's choice, or the first seen."""

    def __init__(self) -> None:
        # Without a known model there are no training steps.
        self.has_model = False
        # Backwards since the last training step.
        self.backwards = 0
        self.has_scaler = False
        # Whether the optimizer has stepped since the scaler's last update.
        self.scaler_let = False
        # The optimizer that ends training steps, by id; empty while unknown, and once it is gone.
        # Steps of other optimizers (a GAN's second one) belong to the next training step.
        self.known: dict[int, Callable[[], torch.optim.Optimizer | None]] = {}
        self._named = False
        # Steps of other optimizers since the last training step, by id; and the number of that
        # step.
        self._others: dict[int, int] = {}
        self._others_after = 0
        # How many steps passed before this optimizer was known to end them.
        self.missed = 0
        # Counted since the last training step: backwards seen at the latest optimizer step;
        # optimizer steps directly after a backward (as in a GAN, where each has its own loss).
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
        # Weakly: its state may fill most of a device's memory. The callback must not be a Python
        # function: an exception of a signal handler in it would be lost.
        known[id(optimizer)] = errors.attempt(
            lambda: ref(optimizer, partial(known.pop, id(optimizer))), lambda: None
        )
        self.known = known

    def model_came(self, found: bool = False) -> None:
        """A model is new, or instrumented again: it may have another optimizer than the last one.

        *found*: it was discovered, either to replace others or together with them.
        """
        self.has_model = True
        if not (self._named or (found and self.optimizer is not None)):
            self.known = {}

    def ended_by(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        """Whether the finished step of this optimizer ends training step number *steps* + 1."""
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
        """Another optimizer has stepped; returns how often since the last training step."""
        if steps != self._others_after:
            self._others, self._others_after = {}, steps
        made = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
        return made

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer ends training steps."""
        return id(optimizer) in self.known

    def scaler_skips(self, found: Any) -> bool:
        """Whether the scaler, about to be updated, has skipped our optimizer's step.

        *found*: the inf checks since its last update, by optimizer id; a GAN may have one update
        per optimizer. The answer is known on the host, so no device is synchronized.
        """
        let, self.scaler_let = self.scaler_let, False
        took_part = not isinstance(found, dict) or any(each in found for each in self.known)
        return not let and (took_part or not self.known)

    def step_ended(self) -> None:
        """A training step has ended."""
        self.several_losses |= self._losses > 1
        self.backwards = self._stepped_after = self._losses = 0


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """The step count in the optimizer's own state, including steps before a checkpoint; at least 1.

    Adam and similar ones count. A count on a device is not read, as that would synchronize.
    """
    count: Any = next((state["step"] for state in optimizer.state.values() if "step" in state), 1)
    on_host = type(count) is torch.Tensor and count.device.type == "cpu" and count.numel() == 1
    return max(1, int(count)) if on_host or isinstance(count, int) else 1
