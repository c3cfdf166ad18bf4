"""Takes the readings of loss, FLOPs, gradients, memory and devices, mostly between steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from otel_ddp import errors
from otel_ddp.recording.device_scalars import captures, module_of
from otel_ddp.torch import inspection
from otel_ddp.torch.collectives import SENDS, OwnCollectives
from otel_ddp.torch.device_clock import DeviceClock, clock_for
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import runtime
from otel_ddp.torch.hooks.called import Called
from otel_ddp.torch.readings import capabilities
from otel_ddp.torch.readings.devices import MemoryReadings, gpu_facts
from otel_ddp.torch.readings.flops import ModelFlops
from otel_ddp.torch.readings.loss import StepLoss
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.stream_waits import waits_for
from otel_ddp.torch.steps.watched_model import WatchedModel
from otel_ddp.vocabulary import catalog

# The run's capabilities (which values can be measured) are reported after this many steps, when the
# structure of the loop is known, and are checked again until `_STEPS_TO_WATCH`.
_STEPS_TO_KNOW = 3
_STEPS_TO_WATCH = 20
# Slow readings are taken at each of this many first flushes, so that short runs have some.
# Later they are taken periodically, as they cost more than the hooks of a step.
_READINGS_AT_ONCE = 20
_READ_EVERY_NS = 10**9
# The private attribute in which a gradient scaler holds its inf checks since the last update.
_FOUND = "_per_optimizer_states"


class StepOptions(NamedTuple):
    """The options of `instrument` and of the run, without the optimizers."""

    scaler: Any = None
    flops_per_sample: float | None = None
    every: int = 100
    overhead: float = math.inf
    """Limit of our share of the training thread's time; infinite: measure all steps."""
    leads: bool = True
    """Whether this rank records the values that are the same on all ranks."""
    reads_loss: bool = True
    """Whether to read the loss; False if a trainer logs another value under the same name."""
    settle: Callable[[], bool] | None = None
    """Reads this process's rank from the process group; returns True once the rank is final."""


class Readings:
    """Takes all readings of a process, on the training thread (or in backward while that waits)."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._steps, self._recorder = stepper.progress.steps, stepper.progress.recorder
        self._options = StepOptions()
        self._optimizer: Callable[[], Any] = _none
        self.flops = ModelFlops(stepper.progress)
        self._loss = StepLoss(self._recorder)
        self._memory: MemoryReadings | None = None
        self._norm: torch.Tensor | None = None
        self._reentrant = self._sends = False
        self._known: dict[str, str] = {}  # the capabilities as last reported
        self._readings, self._due_ns = 0, 0
        self._device: torch.device | None = None
        self._clock: DeviceClock | None = None
        self._own_collectives = OwnCollectives()
        # Wraps the scaler's `update`: if the scaler skips a step, no hook of the optimizer runs.
        self._updates: Called | None = None
        stepper.sampled.readings = self

    def update_options(
        self, optimizer: Any = None, step_optimizer: Any = None, **options: Any
    ) -> None:
        """Set the options of a call of `instrument`; None keeps an earlier value."""
        stepper = self._stepper
        # Keep only weak references to optimizers: their state may fill most of a device's memory.
        if step_optimizer is not None:
            stepper.end.choose(step_optimizer, named=True)
        if optimizer is not None:
            self._optimizer = errors.attempt(partial(ref, optimizer), _none)
        given = {name: value for name, value in options.items() if value is not None}
        found = self._options = self._options._replace(**given)
        stepper.sampled.sample_every(found.every)
        stepper.cost.keep_to(found.overhead)
        self.flops.given_per_sample = found.flops_per_sample
        if found.scaler is not None:
            self._watch(found.scaler)

    def _watch(self, scaler: Any) -> None:
        # Wrap the method in the class that defines it, which may be a base class.
        kinds = (each for each in type(scaler).__mro__ if "update" in vars(each))
        if (owner := next(kinds, None)) is None:
            kind = type(scaler).__name__
            errors.warn_once("scaler", "scaler=%s has no update(): it is ignored.", kind)
            return
        self._stepper.end.has_scaler = True
        self._recorder.totals.count(catalog.TRAINING_STEPS_SKIPPED, 0.0, reason="overflow")
        if self._updates is None:
            self._updates = Called(owner, "update", self._scaler_updates, before=True)

    @errors.contained()
    def _scaler_updates(self, scaler: Any, *_: Any, **__: Any) -> None:
        if scaler is self._options.scaler and self._stepper.alive:
            self._stepper.scaler_updates(getattr(scaler, _FOUND, None))

    def first_step_began(self) -> None:
        """The first step begins: models are on their devices now, so set up device readings."""
        runtime.attach(self._stepper)
        self._settle_identity()
        devices = [p.device for model in model_hooks.trained() for p in model.parameters()]
        if found := gpu_facts(devices):
            self._recorder.documents.facts(found)
        device = next(iter(devices), None)
        if device is None or device.type == "cpu":
            return
        self._device = self.flops.device = device
        self._stepper.group_calls.on_device = True
        self._memory = MemoryReadings(device, self._stepper.progress)
        self._clock = clock_for(device, self._stepper.progress.device_times)
        self._stepper.progress.phases.device_clock = self._clock
        if self._clock is not None and any(map(capabilities.shards, model_hooks.trained())):
            self._stepper.group_calls.waits = waits_for(device, self._stepper.progress)
        # Report now whether this rank has a device clock: the agent compares ranks from the first
        # steps on, and must know.
        self._recorder.documents.facts({"capability": self._device_capability()})

    # -- in a step

    def forward_ended(self, watched: WatchedModel, module: nn.Module, output: Any) -> None:
        """Take the readings that each model needs once, and prepare to read the step's loss."""
        # Without an output, the forward has raised: wait for the next one.
        if watched.flops_per_unit is None and output is not None:
            self._reentrant |= capabilities.checkpoints_reentrantly(output)
            self.flops.forward_ended(watched, module)
        model_hooks.watch_wrapping_ddp(watched, self._stepper)
        if self._stepper.sampled.wants_loss:
            self._stepper.sampled.wants_loss = False
            averages = watched.is_ddp or capabilities.is_sharded(module)
            self._loss.request(averages or capabilities.world_size() == 1)
            self._stepper.sampled.wants_backward = True

    def backward_began(self) -> None:
        """Read the loss from the roots of the backward."""
        stepper, more = self._stepper, False
        capturing = self._device is not None and captures(module_of(self._device))
        if self._loss.is_of_step and not capturing:
            # Autograd calls this method in its own thread, but the tensors at which backward began
            # are on the training thread's stack. Keep no frame in a variable: it would refer to
            # itself, and keep the graph alive.
            roots = inspection.roots_of_backward(
                sys._current_frames().get(stepper.calls.forward_thread)
            )
            # Without roots this backward is `autograd.grad`, as for a gradient penalty or an inner
            # loop. Then the loss's backward comes later.
            more = roots is None or self._loss.read_roots(roots)
        stepper.sampled.wants_backward = more

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradient norm before the optimizer uses the gradients."""
        self._norm = None
        # Skip the norm if gradients are still scaled: a fused optimizer unscales them in its step.
        capturing = self._device is not None and captures(module_of(self._device))
        if getattr(optimizer, "grad_scale", None) is None and not capturing:
            self._norm = norm_of(
                p.grad for group in optimizer.param_groups for p in group["params"]
            )

    # -- steps in which collectives are counted

    def counted_step_begins(self) -> None:
        """Count collectives in the next step, if `comm_wait` is measured."""
        if not self._known:
            self.report()
        several = capabilities.world_size() > 1
        self._own_collectives.counts = several and self._known.get("comm_wait") in ("", SENDS)
        if self._own_collectives.counts:
            waits = self._stepper.group_calls.waits
            self._own_collectives.begin(model_hooks.trained(), numbered=waits is None)

    def hook_called(self, phase: str) -> None:
        """A hook was called, and the open phase is *phase*: count its collectives up to now."""
        if self._own_collectives.counts:
            self._own_collectives.phase_ended(phase)

    def counted_step_ended(self) -> None:
        """Record in which phases the program has collectives of its own."""
        if not self._own_collectives.counts:
            return
        waits = self._stepper.group_calls.waits
        found = self._own_collectives.end(() if waits is None else waits.unseen)
        if self._sends is not (SENDS in found):
            self._sends = SENDS in found
            self.report()
        self._recorder.documents.facts({"own_collectives": [e for e in found if e != SENDS]})

    # -- between steps

    def step_ended(self) -> None:
        """Take the periodic readings."""
        stepper = self._stepper
        now = stepper.progress.phases.clock()
        stepper.sampled.wants_loss = self._options.reads_loss
        self._loss.offer(stepper.end.several_losses)
        if now < self._due_ns and self._norm is None:
            return
        self._readings += 1
        self._due_ns = now + _READ_EVERY_NS if self._readings >= _READINGS_AT_ONCE else 0
        # If steps run without a call of a watched model, search for others. Not if code is
        # compiled: calls inside it are not seen, and the search's hook would cause a recompilation.
        if not stepper.progress.work.forwards and not stepper.compiles:
            stepper.model_not_called()
        model_hooks.watch_compiled_in_place()
        runtime.attach(stepper)
        self._settle_identity()
        self._stepper.progress.check_agent_if_due()
        self._offer()
        if self._memory is not None:
            self._memory.poll()
        clock_failed = self._clock is not None and self._clock.failed
        calls = stepper.group_calls
        watching = (
            self._steps.count <= _STEPS_TO_WATCH
            or not self._known
            or (clock_failed and not self._known.get("device_clock"))
            or calls.noted != ("calls" in self._known)
            or (calls.waits and calls.waits_seen is (self._known.get("comm_wait") == "fsdp"))
            or stepper.replays != (self._known.get("forward") == "replayed")
        )
        if self._steps.count >= _STEPS_TO_KNOW and watching:
            self.report()

    def _settle_identity(self) -> None:
        settle = self._options.settle
        if settle is not None and settle():
            self._options = self._options._replace(settle=None)

    def _offer(self) -> None:
        found: dict[str, Any] = {}
        norm, self._norm = self._norm, None
        # Check the rank again: a process may get it after `instrument`.
        if self._options.leads and not capabilities.rank():
            found["grad_norm"] = norm
            optimizer = self._stepper.end.optimizer or self._optimizer()
            if groups := getattr(optimizer, "param_groups", None):
                found["learning_rate"] = groups[0].get("lr")
            found["loss_scale"] = getattr(self._options.scaler, "_scale", None)
        number = self._steps.logged_number
        if found := {name: value for name, value in found.items() if value is not None}:
            self._recorder.record_reading(found, number)

    @errors.contained()
    def report(self) -> None:
        """Record which capabilities are measured, as known so far."""
        found = capabilities.measured(
            model_hooks.trained(),
            self._stepper,
            capabilities.world_size(),
            SENDS if self._sends else "reentrant_checkpoint" if self._reentrant else "",
        )
        self._correct_work(found)
        if self._loss.requested:
            found["loss"] = self._loss.missing
        found.update(self._device_capability())
        if found != self._known:
            self._known = found
            missing = "; ".join(capabilities.sentences(found))
            self._recorder.documents.facts({"capability": found, "not_measured": missing})

    def _device_capability(self) -> dict[str, str]:
        if self._memory is None:
            return {}
        found = self._memory.capability()
        if self._clock is None:
            return found | {"device_clock": "device_unknown"}
        return found | {"device_clock": "device_failed" if self._clock.failed else ""}

    def _correct_work(self, found: dict[str, str]) -> None:
        if found["samples"] == "shapes_unknown" and self._stepper.progress.work.tokens:
            found["samples"] = "packed"
        if self.flops.any_shared:
            found["samples"] = found["tokens"] = "shared_batch"
            if self._options.flops_per_sample is None:
                found["flops"] = "shared_batch"

    def close(self) -> None:
        """Measuring ends: record pending readings, and restore the scaler."""
        self._own_collectives.take_off()
        if self._updates is not None:
            self._updates.take_off()
        self._loss.offer(self._stepper.end.several_losses)
        self._loss.record()
        if not self._known and (self._stepper.progress.work.forwards or self._steps.count):
            self.report()
        if self._clock is not None:
            self._stepper.progress.phases.device_clock = None
            self._clock.close()


def _none() -> None:
    pass


# -- the norm of a step's gradients, without a collective

_NARROW = (torch.float16, torch.bfloat16)


def norm_of(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The norm over all gradients; None if they are sharded over ranks or on several devices.

    The result stays on the device, so that the host does not wait.
    """
    found = [each for each in gradients if each is not None]
    # Skip DTensors, whose norm would be a collective.
    if any(hasattr(each, "placements") or each.layout is not torch.strided for each in found):
        return None
    if len({each.device for each in found}) != 1:
        return None
    with torch.no_grad():
        # In float32, as the square of a float16 may overflow.
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.float32 if each.dtype in _NARROW else None)
            for each in found
        ]
        return torch.stack([norm.to(torch.float32) for norm in norms]).square().sum().sqrt()
