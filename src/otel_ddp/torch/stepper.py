"""Divides a training step among its phases, from what the hooks of model and optimizer tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

from otel_ddp import containment
from otel_ddp.progress import Phase, Standing
from otel_ddp.torch.workload import workload

_FAILURES_ALLOWED = 3

# Private, and asked for by name so that a torch without it costs only what it is for.
_current_backward = getattr(torch._C, "_current_graph_task_id", None)


def _outside_of_backward() -> bool:
    """Whether this thread is surely not working for a backward."""
    return _current_backward is not None and bool(_current_backward() == -1)


class Stepper:
    """One a process. Called by hooks at any moment; what it raises is caught by `failed`.

    Hooks tell beginnings and ends, but an exception in forward or backward leaves ends untold:
    whatever begins next closes what is still open.
    """

    def __init__(self, standing: Standing) -> None:
        self.alive = True
        self._standing = standing
        self._failures = 0
        # Phases of ours, one each: none of them is ever inside itself.
        self._data = Phase("data")
        self._forward = Phase("forward")
        self._eval = Phase("eval")
        self._backward = Phase("backward")
        self._wait = Phase("comm_wait")
        self._buffers = Phase("comm_wait")
        self._optimizer = Phase("optimizer")
        self._inside = 0  # forwards of watched models that are open, one inside the other
        self._training = False
        self._session = False  # one backward at a time, of whatever models
        self._stepped_in_backward = False
        # The optimizer whose step ends ours: the first one seen, unless the user names one.
        self.step_optimizer: int | None = None
        self.gc_s = 0.0
        self._samples = self._tokens = self._micro_batches = 0

    def failed(self, where: str) -> None:
        """A hook of ours raised: after three times all of them are switched off."""
        containment.failed(where)
        self._failures += 1
        if self.alive and self._failures >= _FAILURES_ALLOWED:
            self.stop()
            containment.log.warning(
                "The hooks of otel_ddp have failed %d times and measure no more steps; "
                "what you log is recorded as before.",
                _FAILURES_ALLOWED,
            )

    def stop(self) -> None:
        """Measure nothing more, and leave no phase open."""
        self.alive = False
        for phase in (self._forward, self._eval, self._backward, self._optimizer, self._data):
            self._standing.leave(phase)

    # -- forward

    def forward_began(
        self, training: bool, waits_for_buffers: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A watched model is called."""
        self._close_what_raised()
        if self._inside or self._session:
            # A model inside a model, or one that is computed again for the backward under way.
            self._inside += 1
            return
        self._inside = 1
        self._training = training
        if not training:
            self._standing.enter(self._eval)
            return
        self._standing.begin_steps()
        self._standing.enter(self._forward)
        if waits_for_buffers:
            self._standing.enter(self._buffers)
        samples, tokens = workload(args, kwargs)
        self._samples += samples
        self._tokens += tokens

    def buffers_arrived(self) -> None:
        """DDP has given every rank the same buffers; the model itself begins."""
        self._standing.leave(self._buffers)

    def forward_ended(self) -> bool:
        """A watched model has returned, or raised; whether its outputs are to be watched."""
        if self._inside:
            self._inside -= 1
        if self._inside or self._session:
            return False
        self._standing.leave(self._forward if self._training else self._eval)
        return self._training

    # -- backward

    def gradient_arrived(self, gradient: torch.Tensor) -> None:
        """The first gradient of a backward: autograd calls this in whatever thread it works."""
        if self._session or not self.alive:
            return
        try:
            self._session = True
            self._standing.enter(self._backward)
            # Runs when the local gradients are done, and before DDP's own finaliser, which is
            # queued later; what that callback queues in turn runs after the finaliser.
            Variable._execution_engine.queue_callback(self._gradients_done)
        except containment.ANYTHING:
            self.failed("backward began")

    def _gradients_done(self) -> None:
        try:
            self._standing.enter(self._wait)
            Variable._execution_engine.queue_callback(self._backward_ended)
        except containment.ANYTHING:
            self.failed("gradients done")

    def _backward_ended(self) -> None:
        try:
            self._session = False
            self._inside = 0
            # Takes the wait inside it along.
            self._standing.leave(self._backward)
            self._micro_batches += 1
            if self._stepped_in_backward:
                self._stepped_in_backward = False
                self._finish_step()
        except containment.ANYTHING:
            self.failed("backward ended")

    # -- optimizer

    def optimizer_began(self) -> None:
        """An optimizer of a watched model begins its step."""
        self._close_what_raised()
        # One optimizer a parameter, inside backward: that time stays backward.
        if not self._session:
            self._standing.enter(self._optimizer)

    def optimizer_ended(self, optimizer: int) -> None:
        """An optimizer of a watched model has finished its step."""
        if self._session:
            self._stepped_in_backward = True
            return
        self._standing.leave(self._optimizer)
        # The first one seen closes the step; another one (a GAN's second) is part of the next
        # step, which has just as much of it.
        if self.step_optimizer is None:
            self.step_optimizer = optimizer
        if self.step_optimizer == optimizer:
            self._finish_step()

    # -- data

    def data_began(self) -> None:
        """Somebody asks a loader for the next batch."""
        self._close_what_raised()
        if not self._inside and not self._session:
            self._standing.begin_steps()
            self._standing.enter(self._data)

    def data_ended(self) -> None:
        """The batch is there."""
        self._standing.leave(self._data)

    # -- the step

    def _close_what_raised(self) -> None:
        """An exception in backward leaves its end untold; forward tells its end in any case."""
        if self._session and _outside_of_backward():
            self._session = False
            self._inside = 0
            self._standing.leave(self._backward)

    def _finish_step(self) -> None:
        self._standing.step_finished(self._samples, self._tokens, self._micro_batches, self.gc_s)
        self._samples = self._tokens = self._micro_batches = 0
        self.gc_s = 0.0
