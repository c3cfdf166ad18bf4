"""Reads, between steps, what models and devices show: FLOPs, loss, gradients, memory, GPUs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from otel_ddp import errors
from otel_ddp.recording.device_scalars import captures, module_of
from otel_ddp.recording.steps import StepNumbers
from otel_ddp.torch import inspection
from otel_ddp.torch.collectives import SENDS, OwnCollectives
from otel_ddp.torch.device_clock import DeviceClock, clock_for
from otel_ddp.torch.hooks import compile as compile_hooks
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks.called import Called
from otel_ddp.torch.readings import capabilities
from otel_ddp.torch.readings.devices import MemoryReadings, gpu_facts, peak
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.watched_model import WatchedModel, shares_its_batch
from otel_ddp.vocabulary import catalog

# By then a loop has shown what it is made of.
_STEPS_TO_KNOW = 3
_STEPS_TO_WATCH = 20
# What changes slowly is read so many times at each flush, for runs that are short; then once in so
# long. A reading costs more than the hooks of a step.
_READINGS_AT_ONCE = 20
_READ_EVERY_NS = 10**9
# So long a loss that backward begins at is kept back: most loops log theirs by then, by that name.
_STEPS_TO_KEEP_BACK = 200
# At most so long: people look for a curve.
_NS_TO_KEEP_BACK = 120 * 10**9
# Where a scaler keeps what it has found since its last update. Private.
_FOUND = "_per_optimizer_states"


class StepOptions(NamedTuple):
    """The options of `instrument`, and those of the run, but for the optimizers."""

    scaler: Any = None
    flops_per_sample: float | None = None
    every: int = 100
    overhead: float = math.inf
    """The share of the training thread's time that we may take; infinite: all steps are measured.
    """
    leads: bool = True
    """Whether this rank records what all ranks have in common."""
    reads_loss: bool = True
    """Whether the loss is read: a trainer may log another by that name."""
    settle: Callable[[], bool] | None = None
    """Asks the process group which rank this is; true once there is nothing more to ask."""


class Readings:
    """One a process, beside the stepper. All of it runs on the training thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._steps, self._recorder = stepper.progress.steps, stepper.progress.recorder
        self._options = StepOptions()
        self._optimizer: Callable[[], Any] = _none
        self.flops = ModelFlops(stepper)
        self._loss = StepLoss()
        # The loss, its step, and when it was read.
        self._kept_back: list[tuple[Any, int, int]] = []
        self._memory: MemoryReadings | None = None
        self._norm: torch.Tensor | None = None
        self._reentrant = self._sends = False
        self._known: dict[str, str] = {}  # the last report of capabilities
        self._readings, self._due_ns = 0, 0
        self._device: torch.device | None = None
        self._clock: DeviceClock | None = None
        self._own_collectives = OwnCollectives()
        # Of the scaler: a step that it leaves out calls no hook.
        self._updates: Called | None = None
        stepper.sampled.readings = self

    def update_options(
        self, optimizer: Any = None, step_optimizer: Any = None, **options: Any
    ) -> None:
        """What came with a model; with the next model, what is new counts."""
        stepper = self._stepper
        # Weakly: the state of an optimizer may be most of the memory of a device.
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
            stepper.end.has_scaler = True
            self._recorder.totals.count(catalog.TRAINING_STEPS_SKIPPED, 0.0, reason="overflow")
            # The class that has the function may be one above.
            kinds = (each for each in type(found.scaler).__mro__ if "update" in vars(each))
            if self._updates is None and (owner := next(kinds, None)) is not None:
                self._updates = Called(owner, "update", self._scaler_updates, before=True)

    @errors.contained()
    def _scaler_updates(self, scaler: Any, *_: Any, **__: Any) -> None:
        if scaler is self._options.scaler and self._stepper.alive:
            self._stepper.scaler_updates(getattr(scaler, _FOUND, None))

    def first_step_began(self) -> None:
        """Now the models are where they will stay."""
        compile_hooks.attach(self._stepper)
        self._settle_identity()
        devices = [p.device for model in model_hooks.trained() for p in model.parameters()]
        if found := gpu_facts(devices):
            self._recorder.documents.facts(found)
        device = next(iter(devices), None)
        if device is None or device.type == "cpu":
            return
        self._device = self.flops.device = device
        # There this rank arrives later than its host calls, and nobody has looked when.
        self._stepper.group_calls.give_up()
        self._memory = MemoryReadings(device, self._stepper.progress)
        self._clock = clock_for(device, self._stepper.progress.device_times)
        self._stepper.progress.phases.device_clock = self._clock
        # At once: the first steps are compared by this clock or by none.
        self._recorder.documents.facts({"capability": self._device_capability()})

    # -- in a step

    def forward_ended(self, watched: WatchedModel, module: nn.Module, output: Any) -> None:
        """Look at what is looked at once, and read the loss where the backward begins."""
        # Without an output it has raised.
        if watched.flops_per_unit is None and output is not None:
            self._reentrant |= capabilities.checkpoints_reentrantly(output)
            self.flops.forward_ended(watched, module)
        model_hooks.watch_wrapping_ddp(watched, self._stepper)
        if self._stepper.sampled.wants_loss:
            self._stepper.sampled.wants_loss = False
            averages = watched.is_ddp or capabilities.is_sharded(module)
            self._loss.ask(self._steps, averages or capabilities.world_size() == 1)
            self._stepper.sampled.wants_backward = True

    def backward_began(self) -> None:
        """Read the loss that it begins at."""
        stepper, more = self._stepper, False
        capturing = self._device is not None and captures(module_of(self._device))
        if self._loss.is_of(self._steps) and not capturing:
            # Autograd calls us in a thread of its own, while the loop's waits in its call. No local
            # keeps the frame: it may be this one, and would hold itself and the graph.
            roots = inspection.roots_of_backward(
                sys._current_frames().get(stepper.calls.forward_thread)
            )
            # A penalty of gradients and an inner loop come before the loss itself.
            more = roots is None or self._loss.read_roots(roots)
        stepper.sampled.wants_backward = more

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the gradients before the optimizer uses them."""
        self._norm = None
        # A fused optimizer has its gradients unscaled in its own step: they are still scaled here.
        capturing = self._device is not None and captures(module_of(self._device))
        if getattr(optimizer, "grad_scale", None) is None and not capturing:
            self._norm = norm_of(
                p.grad for group in optimizer.param_groups for p in group["params"]
            )

    # -- a step in which collectives are counted

    def counted_step_begins(self) -> None:
        """Count the collectives of the next step, if waits are measured at all."""
        if not self._known:
            self.report()
        several = capabilities.world_size() > 1
        self._own_collectives.counts = several and self._known.get("comm_wait") in ("", SENDS)
        if self._own_collectives.counts:
            self._own_collectives.begin(model_hooks.trained())

    def hook_called(self, phase: str) -> None:
        """Until now it was in this phase."""
        if self._own_collectives.counts:
            self._own_collectives.phase_ended(phase)

    def counted_step_ended(self) -> None:
        """Record in which phases there were collectives."""
        if not self._own_collectives.counts:
            return
        found = self._own_collectives.end()
        if self._sends is not (SENDS in found):
            self._sends = SENDS in found
            self.report()
        self._recorder.documents.facts({"own_collectives": [e for e in found if e != SENDS]})

    # -- between steps

    def step_ended(self) -> None:
        """Record what is read now and then."""
        stepper = self._stepper
        now = stepper.progress.phases.clock()
        stepper.sampled.wants_loss = self._options.reads_loss
        if now < self._due_ns and self._norm is None:
            self._offer_loss()
            return
        self._readings += 1
        self._due_ns = now + _READ_EVERY_NS if self._readings >= _READINGS_AT_ONCE else 0
        # Inside of compiled code no call is seen, and a search would have it compiled once more.
        if not stepper.progress.work.forwards and not stepper.compiles:
            stepper.search.model_not_called()
        model_hooks.watch_compiled_in_place()
        compile_hooks.attach(stepper)
        self._settle_identity()
        self._stepper.progress.check_agent_if_due()
        self._offer()
        if self._memory is not None:
            self._memory.poll()
        clock_failed = self._clock is not None and self._clock.failed
        watching = (
            self._steps.count <= _STEPS_TO_WATCH
            or not self._known
            or (clock_failed and not self._known.get("device_clock"))
            or stepper.group_calls.noted != ("calls" in self._known)
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
        # A process that did not know its rank when the model came may know it by now.
        if self._options.leads and not capabilities.rank():
            found["grad_norm"] = norm
            optimizer = self._stepper.end.optimizer or self._optimizer()
            if groups := getattr(optimizer, "param_groups", None):
                found["learning_rate"] = groups[0].get("lr")
            found["loss_scale"] = getattr(self._options.scaler, "_scale", None)
        number = self._steps.logged_number
        if found := {name: value for name, value in found.items() if value is not None}:
            self._recorder.record_reading(found, number)
        self._offer_loss()

    @errors.contained()
    def _offer_loss(self) -> None:
        found = self._loss.pop()
        if self._stepper.end.several_losses:
            self._loss.missing = "several_losses"
        elif found is not None:
            steps_before, loss = found
            since = self._steps.count - steps_before - 1
            number = self._steps.logged_number - since
            self._kept_back.append((loss, max(0, number), time.time_ns()))
        kept_ns = time.time_ns() - self._kept_back[0][2] if self._kept_back else 0
        enough = self._steps.count >= _STEPS_TO_KEEP_BACK or kept_ns >= _NS_TO_KEEP_BACK
        if enough:
            self._record_losses()

    def _record_losses(self) -> None:
        losses, self._kept_back = self._kept_back, []
        for loss, number, read_ns in losses:
            self._recorder.record_reading({"loss": loss}, number, read_ns)

    @errors.contained()
    def report(self) -> None:
        """Record what is measured and what is not, as far as the run has shown it."""
        found = capabilities.measured(
            model_hooks.trained(),
            self._stepper,
            capabilities.world_size(),
            SENDS if self._sends else "reentrant_checkpoint" if self._reentrant else "",
        )
        self._correct_work(found)
        if self._loss.asked:
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
        """The hooks come off: report if that was not done, and keep nothing."""
        self._own_collectives.take_off()
        if self._updates is not None:
            self._updates.take_off()
        self._offer_loss()
        self._record_losses()
        if not self._known and (self._stepper.progress.work.forwards or self._steps.count):
            self.report()
        if self._clock is not None:
            self._stepper.progress.phases.device_clock = None
            self._clock.close()


def _none() -> None:
    pass


# -- the loss of a step: the number at which its backward begins

_MULTIPLIED, _DIVIDED = "MulBackward", "DivBackward"
# Such a node makes one number of one number; so does one that was given a single one.
_ONE_TO_ONE = {
    *("AddBackward", "CatBackward", "CloneBackward", "StackBackward", "ToCopyBackward"),
    *(_MULTIPLIED, _DIVIDED),
}
_MOST_NODES = 16
# This rank's part of a DTensor.
_LOCAL = "_ToTorchTensorBackward"
# Why a root is no loss by itself: it was divided at last, and may be a share of one.
_QUOTIENT = "quotient"
# What a node knows of its begin, also once its tensors are freed.
_SIZES = "_saved_self_sym_sizes"


class StepLoss:
    """What the backward of a step begins at."""

    def __init__(self) -> None:
        # Whether it was asked for at all, and why the last step that was asked gave none.
        self.asked, self.missing = False, ""
        self._loss: tuple[int, Any] | None = None
        # The step of the forward that was asked.
        self._asked_in = 0
        # Whether gradients are those of one rank, or their mean over ranks.
        self._averages = False
        # How many quotients were added up in this step, and in the last one of such.
        self._shares = self._usual_shares = 0

    def ask(self, steps: StepNumbers, averages: bool) -> None:
        """A forward of a step has ended whose loss is to be read. *averages*: as above."""
        self.asked, self.missing = True, "no_loss"
        self._asked_in, self._averages = steps.count, averages
        self._loss, self._shares = None, 0

    def is_of(self, steps: StepNumbers) -> bool:
        """Whether the step of the forward that was asked is still open."""
        return steps.count == self._asked_in

    def read_roots(self, roots: tuple[Any, ...]) -> bool:
        """Keep what a backward begins at; true if that of the step's next one is to be added."""
        number, missing = _begun_at(roots[0] if len(roots) == 1 else None)
        if is_share := missing == _QUOTIENT and self._averages:
            # Each batch contributes its quotient: their sum is the loss of the step.
            before = self._loss[1] if self._loss is not None else 0.0
            self._shares += 1
            self._keep(before + number)
        elif missing or self._shares:
            self._loss, self._shares = None, 0
            self.missing = missing if missing == "no_loss" else "scaled_loss"
        else:
            self._keep(number)
        return is_share

    def _keep(self, number: Any) -> None:
        self.missing, self._loss = "", (self._asked_in, number)

    def pop(self) -> tuple[int, Any] | None:
        """The loss to record, and the number of steps before its own."""
        found, self._loss = self._loss, None
        if found is not None and self._shares:
            # A step of fewer batches, as the last one of an epoch, has a part of a loss.
            usual, self._usual_shares = self._usual_shares, self._shares
            return found if self._shares >= usual else None
        return found


def _begun_at(root: Any) -> tuple[Any, str]:
    """The number at this root of a backward, and why it is no loss.

    By how much it was multiplied is not known any more: autograd has freed what that node has kept.
    """
    # One of a subclass of tensors may be a part of a loss, or its copies a collective. One element
    # of a vector may be anything: what a critic thinks of a state, say.
    if type(root) is not torch.Tensor or root.dim() or not root.is_floating_point():
        return None, "no_loss"
    why, node, passed = "", root.grad_fn, 0
    while node is not None and passed < _MOST_NODES:
        kind = node.name().rstrip("0123456789")
        if kind == _LOCAL:
            return None, "no_loss"
        # `(loss / 4).mean()` is as scaled as `loss / 4`.
        before = [each for each, _ in node.next_functions if each is not None]
        is_one = kind in _ONE_TO_ONE or math.prod(getattr(node, _SIZES, (0,))) == 1
        if len(before) != 1 or not is_one:
            break
        if kind == _MULTIPLIED:
            why = "scaled_loss"
        elif kind == _DIVIDED:
            why = why or _QUOTIENT
        (node,) = before
        passed += 1
    return _kept(root), why


def _kept(loss: torch.Tensor) -> Any:
    """Its number, or a copy: the loop may change the loss in place, and a device has none yet."""
    # Traced by `make_fx` it raises.
    number = errors.attempt(loss.item, None) if loss.device.type == "cpu" else None
    return loss.detach().clone() if number is None else number


# -- the norm of the gradients of a step, without a collective

_NARROW = (torch.float16, torch.bfloat16)


def norm_of(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Of all gradients together; None where this rank does not hold all of them, on one device.

    A number on that device: the host does not wait for it.
    """
    found = [each for each in gradients if each is not None]
    # The norm of a DTensor is a collective.
    if any(hasattr(each, "placements") or each.layout is not torch.strided for each in found):
        return None
    if len({each.device for each in found}) != 1:
        return None
    with torch.no_grad():
        # The square of a float16 overflows one.
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.float32 if each.dtype in _NARROW else None)
            for each in found
        ]
        return torch.stack([norm.to(torch.float32) for norm in norms]).square().sum().sqrt()


# -- the FLOPs of a model: from parameters and tokens, unless the user passes them


class ModelFlops:
    """Settles the FLOPs of each model once, as its first training forward ends.

    By then a model has built what it builds lazily.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._work, self._recorder = stepper.progress.work, stepper.progress.recorder
        # What the user knows, forward and backward.
        self.given_per_sample: float | None = None
        self.device: torch.device | None = None
        self.any_shared = False
        """Whether other ranks work on the batches of one of the models."""

    def forward_began(self, watched: WatchedModel, module: nn.Module) -> None:
        """A training forward of a model whose FLOPs are not settled."""
        watched.shared = shares_its_batch(module)
        self.any_shared |= watched.shared

    def forward_ended(self, watched: WatchedModel, module: nn.Module) -> None:
        """The same forward has returned."""
        word = _dtype_of(module)
        if word == "float32" and self.device is not None and _uses_tf32(self.device):
            word = "tf32"
        if self.given_per_sample is not None:
            watched.flops_per_unit, watched.by_samples = float(self.given_per_sample), True
            self._work.flops_method = "given"
        # Each of several ranks that share a batch would count all of it.
        elif watched.tokens and not watched.shared and not _is_in_parts(module):
            watched.flops_per_unit = by_parameters(module)
            self._work.flops_method = "6pt"
        else:
            watched.flops_per_unit = 0.0
        self._work.flops += watched.flops
        self._recorder.documents.facts({"precision": word})
        if watched.flops_per_unit and (device := self.device) is not None:
            # A device without a module or a name has no known peak.
            name = errors.attempt(lambda: str(module_of(device).get_device_name(device)), "")
            if (most := peak(name, word)) is not None:
                self._recorder.totals.stamp(
                    catalog.TRAINING_FLOPS_PEAK, most, dtype=word, device=name
                )


def by_parameters(module: nn.Module) -> float:
    """The usual estimate of a transformer for a token: 2 FLOPs a parameter forward, 4 backward.

    Nothing backward for frozen parameters. Gradients may pass through them to trained ones below
    (LoRA's do, at 2 more), but parameters do not show that. Attention itself is not in it.
    """
    # A lookup multiplies nothing, but an embedding may also be the weight of an output layer.
    multiplied = {
        id(each): each
        for owner in module.modules()
        if not isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        for each in owner.parameters(False)
    }
    return float(sum((6 if e.requires_grad else 2) * e.numel() for e in multiplied.values()))


def _is_in_parts(module: nn.Module) -> bool:
    """Whether this rank does not see the sizes of all parameters: FSDP1 and ZeRO-3 hold shards."""
    kinds = {base.__name__ for each in module.modules() for base in type(each).__mro__}
    empty = any(not each.numel() for each in module.parameters())
    return empty or "FullyShardedDataParallel" in kinds


def _uses_tf32(device: torch.device) -> bool:
    """Whether products of float32 go to the tensor cores."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    backend = torch.backends.cuda.matmul
    # Newer versions of torch have this setting, and raise for the older one where this one is set.
    precision = getattr(backend, "fp32_precision", None)
    return bool(backend.allow_tf32 if precision is None else precision == "tf32")


def _dtype_of(module: nn.Module) -> str:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return "float32"
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")
