"""What is read off between steps: what the model learns with, how much it computes, its memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import nn

from otel_ddp import catalog, containment
from otel_ddp.torch import inspect_values
from otel_ddp.torch.device_clock import DeviceClock, clock_for
from otel_ddp.torch.hooks import compile as compile_hooks
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.readings import capabilities, flops, peaks
from otel_ddp.torch.readings.allocator import Allocator
from otel_ddp.torch.readings.gpu_ids import boards
from otel_ddp.torch.readings.gradient_norm import SquareNorm, square_norm
from otel_ddp.torch.readings.own_collectives import OwnCollectives, none_yet, turns
from otel_ddp.torch.readings.workload import Shapes, note, shares_its_batch
from otel_ddp.torch.stepper import Stepper

_MEMORY_EVERY_S = 5.0
# The first forward may build what is built lazily, or compile.
_COUNTED_FORWARD = 2
# By then a loop has shown what it is made of.
_STEPS_TO_KNOW = 3
_STEPS_TO_WATCH = 20
# How much of a tuple is looked through for a loss.
_MOST_RETURNED = 16
# Where a scaler keeps what it has found since its last update. Private.
_ROUND = "_per_optimizer_states"


class StepOptions(NamedTuple):
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
    settle: Callable[[], bool] | None = None
    """Asks the process group who this process is; true once there is nothing more to ask."""


# What a model's FLOPs rest on: which parameters are trained, and the shapes of a sample.
_Basis: TypeAlias = tuple[bytes, "Shapes | None"]


class _Work:
    """What is known of how much one model computes."""

    __slots__ = ("basis", "each", "figures", "looks", "method", "shared", "wanted", "watched")

    def __init__(self, watched: Any) -> None:
        self.watched = watched  # held, so that no other one has its id
        self.shared = False  # whether other ranks work on the same samples
        self.wanted = True  # whether its next forward is looked at
        self.method = ""
        self.each: float | None = None
        self.basis: _Basis = (b"", None)
        self.figures: dict[_Basis, float] = {}
        self.looks = 0

    @property
    def may_count(self) -> bool:
        # Shapes that are others at every look are counted ever more rarely.
        return len(self.figures) <= self.looks.bit_length()


class Readings:
    """One a process, beside the stepper. All of it runs on the training thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._progress = stepper.progress
        self._wishes = StepOptions()
        self._optimizer: Callable[[], Any] = _nobody
        self._norm: SquareNorm | None = None
        self._loss: Any = None
        self._lossless = ""  # why the last forward that was asked for a loss gave none
        self._asked_loss = False
        self._loss_after = 0  # steps before the one that the loss is of
        self._counter = flops.ForwardCounter()
        self._works: dict[int, _Work] = {}
        self._uncounted = ""
        self._reentrant = False
        self._counts = False
        self._known: dict[str, str] = {}
        self._said = False
        self._early = False  # for what the first collective shows
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

    def hear(self, wishes: StepOptions) -> None:
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
            self._progress.recorder.count(catalog.TRAINING_STEPS_SKIPPED, 0.0, reason="overflow")

    def first_step(self) -> None:
        """Work begins: now the models are where they will stay."""
        compile_hooks.attach(self._stepper)
        self._settle_identity()
        devices = [p.device for model in model_hooks.watched() for p in model.parameters()]
        if found := boards(devices):
            self._progress.recorder.facts(found)
        device = next(iter(devices), None)
        if device is None or device.type == "cpu":
            return
        self._device = device
        self._allocator = Allocator(device) if device.type == "cuda" else None
        self._clock = clock_for(device, self._progress.add_device_time)
        self._progress.device_clock = self._clock

    # -- in a step

    def forward_began(self, watched: Any, module: nn.Module) -> None:
        """A training forward of a model whose FLOPs are not known yet, or may be others by now."""
        if self._counter.active:
            self._counter.stop()  # an interruption called no hook
        if (work := self._works.get(id(watched))) is None:
            work = self._works[id(watched)] = _Work(watched)
        shapes, note.shapes = note.shapes, None
        work.shared = work.shared or shares_its_batch(module)
        if work.shared:
            self._leave_out(watched, work)
        elif work.each is not None:
            self._look_again(watched, module, work, shapes)
        else:
            self._look_first(watched, module, work, shapes)
        note.wanted = any(each.wanted for each in self._works.values())

    def _leave_out(self, watched: Any, work: _Work) -> None:
        """Each of the ranks would tell all of the batch: none does, but for a figure given."""
        watched.forwards += 1
        work.wanted = False
        if self._stepper.fed_last:
            self._progress.samples -= watched.samples
            self._progress.tokens -= watched.tokens
        if self._wishes.flops_per_sample is not None:
            self._progress.flops_method = "given"
            self._progress.flops += float(self._wishes.flops_per_sample) * watched.samples

    def _look_first(
        self, watched: Any, module: nn.Module, work: _Work, shapes: Shapes | None
    ) -> None:
        watched.forwards += 1
        if watched.forwards != _COUNTED_FORWARD:
            return
        work.wanted = False
        if self._wishes.flops_per_sample is not None:
            self._settle(watched, module, float(self._wishes.flops_per_sample), "given", "")
        elif flops.countable(module):
            work.basis = (_trained(module), shapes)
            self._counter.start()
        else:
            self._estimate(watched, module)

    def _look_again(
        self, watched: Any, module: nn.Module, work: _Work, shapes: Shapes | None
    ) -> None:
        """What the figure rests on may have changed since."""
        work.wanted = False
        work.looks += 1
        if work.method == "6pt":
            work.each = flops.by_parameters(module, 1)
        else:
            basis = (_trained(module), shapes)
            if basis in work.figures:
                work.each = work.figures[basis]
            elif work.may_count and flops.countable(module):
                work.basis = basis
                self._counter.start()
        if not self._counter.active:
            self._go_on(watched, work)

    def _go_on(self, watched: Any, work: _Work) -> None:
        watched.flops_per_unit = work.each
        self._progress.flops += (work.each or 0.0) * (watched.tokens or watched.samples)

    def forward_ended(self, watched: Any, module: nn.Module, output: Any) -> None:
        """The same forward is over."""
        if self._counter.active:
            counted = self._counter.stop()
            units = watched.tokens or watched.samples
            work = self._works[id(watched)]
            if work.each is not None:
                if output is not None:
                    # What cannot be counted any more stays as it was, as far as anybody knows.
                    work.each = counted.total / units if counted and units else work.each
                    work.figures[work.basis] = work.each
                self._go_on(watched, work)
            elif output is None:
                watched.forwards -= 1  # it raised in the middle: the next one is counted
                work.wanted = note.wanted = True
            elif counted is None:
                self._estimate(watched, module)
            elif units:
                self._settle(watched, module, counted.total / units, "counted", counted.dtype)
        if watched.forwards <= _COUNTED_FORWARD:
            self._reentrant |= capabilities.checkpoints_reentrantly(output)
        model_hooks.follow(watched)
        if self._stepper.wants_loss:
            self._stepper.wants_loss = False
            self._read_loss(watched, output)
            self._loss_after = self._stepper.steps

    def _read_loss(self, watched: Any, output: Any) -> None:
        self._asked_loss = True
        if watched.divided_loss:
            self._loss, self._lossless = None, "divided_loss"
        else:
            self._loss, self._lossless = _loss_of(output)

    def _estimate(self, watched: Any, module: nn.Module) -> None:
        self._stepper.float16 |= _dtype_of(module) == "float16"
        if watched.tokens:
            self._settle(watched, module, flops.by_parameters(module, 1), "6pt", "")
        else:
            watched.flops_per_unit = 0.0
            self._uncounted = "compiled" if flops.anything_compiled() else "uncountable"

    def _settle(
        self, watched: Any, module: nn.Module, each: float, method: str, dtype: str
    ) -> None:
        watched.flops_per_unit = each
        watched.by_samples = method == "given"
        self._progress.flops_method = method
        if method != "given":
            work = self._works[id(watched)]
            work.method, work.each = method, each
            work.figures[work.basis] = each
        units = watched.samples if watched.by_samples else watched.tokens or watched.samples
        # Those before were like this one, as far as anybody knows.
        self._progress.flops += each * units * watched.forwards
        word = dtype or _dtype_of(module)
        self._stepper.float16 |= word == "float16"
        self._progress.recorder.facts({"precision": word})
        if self._device is not None and self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
            if (most := peaks.peak(name, word)) is not None:
                self._progress.recorder.stamp(
                    catalog.TRAINING_FLOPS_PEAK, most, dtype=word, device=name
                )

    def forward_interrupted(self) -> None:
        """A forward was left without a word: nothing of ours stays behind."""
        if self._counter.active:
            self._counter.stop()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that is looked at closely is about to change the weights."""
        self._doubt_flops()
        self._norm = None
        # Gradients that a fused optimizer scales back by itself are not what they seem.
        if getattr(optimizer, "grad_scale", None) is None and not _capturing(self._device):
            self._norm = square_norm(
                p.grad for group in optimizer.param_groups for p in group["params"]
            )

    def _doubt_flops(self) -> None:
        for key, work in list(self._works.items()):
            if work.watched.model() is None:
                del self._works[key]
            elif work.each is not None:
                # The next forward comes by here.
                work.watched.flops_per_unit = None
                work.wanted = True
        note.wanted = any(each.wanted for each in self._works.values())

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
            self._progress.recorder.facts({"own_collectives": self._own.end()})

    def _next_turn(self) -> None:
        # Hooks that were taken off and put on again go on counting.
        done = self._progress.step_count + 1
        self._stepper.count_at = next(turn for turn in self._turns if turn > done)

    # -- between steps

    def after_step(self) -> None:
        """Something was just told, or the step was one to look at closely."""
        stepper = self._stepper
        model_hooks.watch_compiled()
        compile_hooks.attach(stepper)
        self._settle_identity()
        self._offer()
        self._read_memory()
        stepper.wants_loss = True
        watching = stepper.steps <= _STEPS_TO_WATCH or not self._said
        # That one may come late: local SGD, averaging by hand.
        if (stepper.steps >= _STEPS_TO_KNOW and watching) or (self._early and not none_yet()):
            self.look()

    def _settle_identity(self) -> None:
        settle = self._wishes.settle
        if settle is not None and settle():
            self._wishes = self._wishes._replace(settle=None)

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
        number = self._progress.logged_number
        if found:
            self._progress.recorder.record_reading(found, number)
        if loss is not None:
            since = self._stepper.steps - self._loss_after - 1
            self._progress.recorder.record_reading({"loss": loss}, max(0, number - since))

    def _read_memory(self) -> None:
        now = time.monotonic()
        if self._allocator is None or now < self._memory_at:
            return
        self._memory_at = now + _MEMORY_EVERY_S
        reading = self._allocator.read()
        if reading is None:
            return
        recorder = self._progress.recorder
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
                self._progress.retries += reading.retries - self._retries
            self._retries = reading.retries

    @containment.contained()
    def look(self) -> None:
        """Say what is measured and what is not, as far as the run has shown it."""
        stepper = self._stepper
        found = capabilities.look(
            model_hooks.watched(), stepper, capabilities.world_size(), self._reentrant
        )
        self._look_at_work(found)
        if self._asked_loss:
            found["loss"] = self._lossless
        if self._device is not None:
            failed = self._clock is not None and self._clock.failed
            word = "device_unknown" if self._clock is None else "device_failed" if failed else ""
            found["device_clock"] = word
        self._early = bool(found["comm_wait"]) and none_yet()
        if found != self._known:
            self._known = found
            self._progress.recorder.facts({"capability": found})
        if not self._said:
            self._said = True
            missing = "; ".join(capabilities.sentences(found))
            if missing and self._wishes.speaks:
                containment.log.warning("Not measured in this run: %s.", missing)

    def _look_at_work(self, found: dict[str, str]) -> None:
        progress = self._progress
        if found["flops"] == "uncountable" and self._uncounted:
            found["flops"] = self._uncounted
        if found["samples"] == "shapes_unknown" and progress.tokens:
            found["samples"] = "packed"
        if any(work.shared for work in self._works.values()):
            found["samples"] = found["tokens"] = "shared_batch"
            if self._wishes.flops_per_sample is None:
                found["flops"] = "shared_batch"

    def leave_to_parent(self) -> None:
        """In a forked child: nothing of ours stays with its thread, and nothing is told."""
        note.wanted = False
        self._counter.close()

    def close(self) -> None:
        """The hooks come off: say what was never said, and hold nothing."""
        note.wanted = False
        self._counter.close()
        if not self._said and (self._stepper.forwards or self._stepper.steps):
            self.look()
        if self._clock is not None:
            self._progress.device_clock = None
            self._clock.close()


def _nobody() -> None:
    pass


def _trained(module: nn.Module) -> bytes:
    return bytes(each.requires_grad for each in module.parameters())


def _learning_rate(optimizer: Any) -> Any:
    groups = getattr(optimizer, "param_groups", None)
    return groups[0].get("lr") if groups else None


def _loss_of(output: Any) -> tuple[Any, str]:
    """The loss that a model returns, kept from being changed by what the loop does with it.

    Beside it why there is none.
    """
    kind = type(output)
    loss: Any
    if issubclass(kind, torch.Tensor):
        loss = output if len(inspect_values.of_tensor(output, "shape")) == 0 else None
    elif issubclass(kind, dict):
        loss = dict.get(output, "loss")
    elif inspect_values.maps(kind):
        loss = dict(inspect_values.items(output)).get("loss")
    else:
        loss = inspect_values.attribute(output, "loss")
        if loss is None and issubclass(kind, tuple | list):
            # `return logits, loss`
            each = (tuple if issubclass(kind, tuple) else list).__iter__(output)
            scalars = [one for one in islice(each, _MOST_RETURNED) if _may_be_a_loss(one)]
            if len(scalars) > 1:
                return None, "several_losses"
            loss = scalars[0] if scalars else None
    # Another subclass of a tensor would be copied by code of the user's.
    if not _is_torchs(loss) or loss.numel() != 1:
        return None, "no_loss"
    return loss.detach().clone(), ""


def _may_be_a_loss(value: Any) -> bool:
    """Whether it is a single number that backward may begin at."""
    return (
        _is_torchs(value)
        # One element of a vector may be anything: what a critic thinks of a state, say.
        and value.dim() == 0
        and value.is_floating_point()
        and bool(value.requires_grad)
    )


def _is_torchs(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, torch.Tensor) and str(kind.__module__).partition(".")[0] == "torch"


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
