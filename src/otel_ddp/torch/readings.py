"""What is read off between steps: what the model learns with, how much it computes, its memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from otel_ddp import catalog, containment
from otel_ddp.torch import capabilities, compile_hooks, flops, held, model_hooks, peaks
from otel_ddp.torch.allocator import Allocator
from otel_ddp.torch.boards import boards
from otel_ddp.torch.device_clock import DeviceClock, clock_for
from otel_ddp.torch.gradient_norm import SquareNorm, square_norm
from otel_ddp.torch.own_collectives import OwnCollectives, turns
from otel_ddp.torch.stepper import Stepper

_MEMORY_EVERY_S = 5.0
# The first forward may build what is built lazily, or compile.
_COUNTED_FORWARD = 2
# By then a loop has shown what it is made of.
_STEPS_TO_KNOW = 3
_STEPS_TO_WATCH = 20
# Where a scaler keeps what it has found since its last update. Private.
_ROUND = "_per_optimizer_states"


class Wishes(NamedTuple):
    """What the user has told `instrument`, and what the run is set to."""

    optimizer: Any = None
    step_optimizer: Any = None
    scaler: Any = None
    flops_per_sample: float | None = None
    every: int = 100
    leads: bool = True
    """Whether this rank says what all ranks have in common."""
    speaks: bool = True
    """Whether this rank tells people what is not measured."""


class Readings:
    """One a process, beside the stepper. All of it runs on the training thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._standing = stepper.standing
        self._wishes = Wishes()
        self._optimizer: Callable[[], Any] = _nobody
        self._norm: SquareNorm | None = None
        self._loss: Any = None
        self._loss_after = 0  # steps before the one that the loss is of
        self._counter = flops.ForwardCounter()
        self._reentrant = False
        self._counts = False
        self._known: dict[str, str] = {}
        self._said = False
        self._device: torch.device | None = None
        self._clock: DeviceClock | None = None
        self._allocator: Allocator | None = None
        self._memory_at = 0.0
        self._retries: int | None = None
        self._own = OwnCollectives()
        self._turns = turns()
        self._next_turn()
        stepper.before_counting = self.before_counting
        stepper.counted = self.counted
        stepper.after_counting = self.after_counting
        stepper.after_step = self.after_step
        stepper.before_optimizer = self.before_optimizer
        stepper.on_forward = self.forward_began
        stepper.on_output = self.forward_ended
        stepper.on_first_step = self.first_step
        stepper.stuck = self.look
        stepper.on_interrupted = self.forward_interrupted

    def hear(self, wishes: Wishes) -> None:
        """What the user says with a model; with the next one, what is new counts."""
        stepper = self._stepper
        # Weakly: the state of an optimizer may be most of the memory of a device.
        if wishes.step_optimizer is not None:
            stepper.ends_steps(wishes.step_optimizer, named=True)
        if wishes.optimizer is not None:
            self._optimizer = containment.attempt(partial(ref, wishes.optimizer), _nobody)
        wishes = wishes._replace(optimizer=None, step_optimizer=None)
        said = {name: value for name, value in wishes._asdict().items() if value is not None}
        wishes = self._wishes = self._wishes._replace(**said)
        stepper.every = wishes.every
        if wishes.scaler is not None:
            stepper.scaling = partial(getattr, wishes.scaler, _ROUND, None)
            self._standing.recorder.count(catalog.TRAINING_STEPS_SKIPPED, 0.0, reason="overflow")

    def first_step(self) -> None:
        """Work begins: now the models are where they will stay."""
        compile_hooks.attach(self._stepper)
        devices = [p.device for model in model_hooks.watched() for p in model.parameters()]
        if found := boards(devices):
            self._standing.recorder.facts(found)
        device = next(iter(devices), None)
        if device is None or device.type == "cpu":
            return
        self._device = device
        self._allocator = Allocator(device) if device.type == "cuda" else None
        self._clock = clock_for(device, self._standing.device_time)
        self._standing.device_clock = self._clock

    # -- in a step

    def forward_began(self, watched: Any, module: nn.Module) -> None:
        """A training forward of a model whose FLOPs are not known yet."""
        if self._counter.active:
            self._counter.stop()  # an interruption called no hook
        watched.forwards += 1
        if watched.forwards != _COUNTED_FORWARD:
            return
        if self._wishes.flops_per_sample is not None:
            self._settle(watched, module, float(self._wishes.flops_per_sample), "given", "")
        elif flops.countable(module):
            self._counter.start()
        else:
            self._estimate(watched, module)

    def forward_ended(self, watched: Any, module: nn.Module, output: Any) -> None:
        """The same forward is over."""
        if self._counter.active:
            counted = self._counter.stop()
            units = watched.tokens or watched.samples
            if output is None:
                watched.forwards -= 1  # it raised in the middle: the next one is counted
            elif counted is None:
                self._estimate(watched, module)
            elif units:
                self._settle(watched, module, counted.total / units, "counted", counted.dtype)
        if watched.forwards <= _COUNTED_FORWARD:
            self._reentrant |= capabilities.checkpoints_reentrantly(output)
        model_hooks.follow(watched)
        if self._stepper.wants_loss:
            self._stepper.wants_loss = False
            self._loss, self._loss_after = _loss_of(output), self._stepper.steps

    def _estimate(self, watched: Any, module: nn.Module) -> None:
        self._stepper.float16 |= _dtype_of(module) == "float16"
        if watched.tokens:
            self._settle(watched, module, flops.by_parameters(module, 1), "6pt", "")
        else:
            watched.flops_per_unit = 0.0

    def _settle(
        self, watched: Any, module: nn.Module, each: float, method: str, dtype: str
    ) -> None:
        watched.flops_per_unit = each
        watched.by_samples = method == "given"
        self._standing.flops_method = method
        units = watched.samples if watched.by_samples else watched.tokens or watched.samples
        # Those before were like this one, as far as anybody knows.
        self._standing.flops += each * units * watched.forwards
        word = dtype or _dtype_of(module)
        self._stepper.float16 |= word == "float16"
        self._standing.recorder.facts({"precision": word})
        if self._device is not None and self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
            if (most := peaks.peak(name, word)) is not None:
                self._standing.recorder.stamp(
                    catalog.TRAINING_FLOPS_PEAK, most, dtype=word, device=name
                )

    def forward_interrupted(self) -> None:
        """A forward was left without a word: nothing of ours stays behind."""
        if self._counter.active:
            self._counter.stop()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that is looked at closely is about to change the weights."""
        self._norm = None
        # Gradients that a fused optimizer scales back by itself are not what they seem.
        if getattr(optimizer, "grad_scale", None) is None and not _capturing(self._device):
            self._norm = square_norm(
                p.grad for group in optimizer.param_groups for p in group["params"]
            )

    # -- a step in which collectives are counted

    def before_counting(self) -> None:
        """The next step is one of those. Where waits are not measured there is nothing to tell."""
        if not self._known:
            self.look()
        self._counts = capabilities.world_size() > 1 and self._known.get("comm_wait") == ""
        if self._counts:
            self._own.begin(model_hooks.watched())

    def counted(self, phase: str) -> None:
        """Something happens in it; until now it was in this phase."""
        if self._counts:
            self._own.passed(phase)

    def after_counting(self) -> None:
        """It is over."""
        self._next_turn()
        if self._counts:
            self._standing.recorder.facts({"own_collectives": self._own.end()})

    def _next_turn(self) -> None:
        # Hooks that were taken off and put on again go on counting.
        done = self._standing.count + 1
        self._stepper.count_at = next(turn for turn in self._turns if turn > done)

    # -- between steps

    def after_step(self) -> None:
        """Something was just told, or the step was one to look at closely."""
        stepper = self._stepper
        model_hooks.watch_compiled()
        compile_hooks.attach(stepper)
        self._offer()
        self._read_memory()
        stepper.wants_loss = True
        if stepper.steps >= _STEPS_TO_KNOW and (stepper.steps <= _STEPS_TO_WATCH or not self._said):
            self.look()

    def _offer(self) -> None:
        found: dict[str, Any] = {}
        norm, self._norm = self._norm, None
        loss, self._loss = self._loss, None
        if norm is not None and norm.sharded:
            found["grad_sq_norm_local"] = norm.value
        # Who did not know its rank when the model came may know by now.
        if self._wishes.leads and not capabilities.rank():
            if norm is not None and not norm.sharded:
                found["grad_norm"] = norm.value.sqrt()
            rate = _learning_rate(self._stepper.step_optimizer or self._optimizer())
            if rate is not None:
                found["learning_rate"] = rate
            scale = getattr(self._wishes.scaler, "_scale", None)
            if scale is not None:
                found["loss_scale"] = scale
        number = self._standing.number
        if found:
            self._standing.recorder.offer(found, number)
        if loss is not None:
            since = self._stepper.steps - self._loss_after - 1
            self._standing.recorder.offer({"loss": loss}, max(0, number - since))

    def _read_memory(self) -> None:
        now = time.monotonic()
        if self._allocator is None or now < self._memory_at:
            return
        self._memory_at = now + _MEMORY_EVERY_S
        reading = self._allocator.read()
        if reading is None:
            return
        recorder = self._standing.recorder
        for metric, value in (
            (catalog.TORCH_CUDA_MEMORY_ALLOCATED, reading.allocated),
            (catalog.TORCH_CUDA_MEMORY_RESERVED, reading.reserved),
            (catalog.TORCH_CUDA_MEMORY_PEAK, reading.peak),
            (catalog.TORCH_CUDA_ALLOC_RETRIES, reading.retries),
            (catalog.TRAINING_OOMS, reading.ooms),
        ):
            if value is not None:
                recorder.stamp(metric, float(value))
        if reading.retries is not None:
            if self._retries is not None and reading.retries > self._retries:
                self._standing.retries += reading.retries - self._retries
            self._retries = reading.retries

    @containment.contained()
    def look(self) -> None:
        """Say what is measured and what is not, as far as the run has shown it."""
        stepper = self._stepper
        found = capabilities.look(
            model_hooks.watched(), stepper, capabilities.world_size(), self._reentrant
        )
        if self._device is not None:
            failed = self._clock is not None and self._clock.failed
            word = "device_unknown" if self._clock is None else "device_failed" if failed else ""
            found["device_clock"] = word
        if found != self._known:
            self._known = found
            self._standing.recorder.facts({"capability": found})
        if not self._said:
            self._said = True
            missing = "; ".join(capabilities.sentences(found))
            if missing and self._wishes.speaks:
                containment.log.warning("Not measured in this run: %s.", missing)

    def leave_to_parent(self) -> None:
        """In a forked child: nothing of ours stays with its thread, and nothing is told."""
        self._counter.close()

    def close(self) -> None:
        """The hooks come off: say what was never said, and hold nothing."""
        self._counter.close()
        if not self._said and (self._stepper.forwards or self._stepper.steps):
            self.look()
        if self._clock is not None:
            self._standing.device_clock = None
            self._clock.close()


def _nobody() -> None:
    pass


def _learning_rate(optimizer: Any) -> Any:
    groups = getattr(optimizer, "param_groups", None)
    return groups[0].get("lr") if groups else None


def _loss_of(output: Any) -> Any:
    """The loss that a model returns, kept from being changed by what the loop does with it."""
    kind = type(output)
    loss: Any
    if issubclass(kind, torch.Tensor):
        loss = output if len(held.of_tensor(output, "shape")) == 0 else None
    elif issubclass(kind, dict):
        loss = dict.get(output, "loss")
    elif held.maps(kind):
        loss = dict(held.items(output)).get("loss")
    else:
        loss = held.attribute(output, "loss")
    # Another subclass of a tensor would be copied by code of the user's.
    kind = type(loss)
    torchs = issubclass(kind, torch.Tensor) and str(kind.__module__).partition(".")[0] == "torch"
    if not torchs or loss.numel() != 1:
        return None
    return loss.detach().clone()


def _dtype_of(module: nn.Module) -> str:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return "float32"
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")


def _capturing(device: torch.device | None) -> bool:
    module = getattr(sys.modules.get("torch"), device.type, None) if device is not None else None
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(asks())
