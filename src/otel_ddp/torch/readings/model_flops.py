"""Finds out how many FLOPs each watched model needs, and adds them to those of the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from otel_ddp import errors
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.torch.readings import flops
from otel_ddp.torch.readings.devices import peak
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.watched_model import (
    Shapes,
    WatchedModel,
    shapes,
    shares_its_batch,
)
from otel_ddp.vocabulary import catalog

# The first forward may build what is built lazily, or compile.
COUNTED_FORWARD = 2
# Of one model: its shapes may differ at each check.
_MOST_COUNTS = 8


class _ModelWork:
    """What is known of the FLOPs of one model."""

    __slots__ = ("basis", "counts", "method", "per_unit", "shared", "watched")

    def __init__(self, watched: WatchedModel) -> None:
        self.watched = watched  # kept, so that no other one can get its id
        self.shared = False  # whether other ranks work on the same samples
        self.method = ""
        self.per_unit: float | None = None
        # What was counted last: which parameters were trained, and the shapes of a sample.
        self.basis: tuple[bytes, Shapes | None] | None = None
        self.counts = 0


class ModelFlops:
    """Counts one forward of each model, and checks now and then whether it is still true."""

    def __init__(self, stepper: Stepper) -> None:
        self._seen = stepper.seen
        self._work, self._recorder = stepper.progress.work, stepper.progress.recorder
        self._counter = flops.ForwardCounter()
        self._works: dict[int, _ModelWork] = {}
        # What the user knows, forward and backward.
        self.given_per_sample: float | None = None
        self.device: torch.device | None = None
        # Why the last model that could not be counted was not.
        self.uncounted = ""

    @property
    def any_shared(self) -> bool:
        """Whether other ranks work on the batches of one of the models."""
        return any(work.shared for work in self._works.values())

    def forward_began(
        self, watched: WatchedModel, module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """A training forward of a model whose FLOPs are not known, or may have changed."""
        self.interrupt()
        if (work := self._works.get(id(watched))) is None:
            work = self._works[id(watched)] = _ModelWork(watched)
        work.shared = work.shared or shares_its_batch(module)
        watched.forwards += work.per_unit is None
        if work.shared:
            self._leave_out(watched)
        elif work.per_unit is not None or watched.forwards == COUNTED_FORWARD:
            self._find(work, module, (_trained(module), shapes(args, kwargs)))

    def _find(self, work: _ModelWork, module: nn.Module, basis: Any) -> None:
        """The first figure of a model; or a new one, where what it depends on has changed."""
        if self.given_per_sample is not None:
            self._settle(work, module, float(self.given_per_sample), "given", "")
        elif (
            work.method != "6pt"
            and basis != work.basis
            and work.counts < _MOST_COUNTS
            and flops.countable(module)
        ):
            work.basis = basis
            work.counts += 1
            self._counter.start()
        else:
            self._do_without_count(work, module)

    def _leave_out(self, watched: WatchedModel) -> None:
        """Each of several ranks would count all of the batch: none does, but for a given figure."""
        watched.counted = False
        if self.given_per_sample is not None:
            self._work.flops_method = "given"
            self._work.flops += float(self.given_per_sample) * watched.samples

    def forward_ended(self, watched: WatchedModel, module: nn.Module, returned: bool) -> None:
        """The same forward has returned or raised."""
        if not self._counter.active:
            return
        counted = self._counter.stop()
        work = self._works[id(watched)]
        if not returned:
            # It raised in the middle: the next one is counted.
            work.basis = None
            watched.forwards -= work.per_unit is None
        elif counted and (units := watched.tokens or watched.samples):
            self._settle(work, module, counted.total / units, "counted", counted.dtype)
        else:
            self._do_without_count(work, module)

    def _do_without_count(self, work: _ModelWork, module: nn.Module) -> None:
        """What was counted is taken to be as it was; else parameters and tokens tell it."""
        watched = work.watched
        if work.method == "counted":
            watched.flops_per_unit = work.per_unit
            self._work.flops += watched.flops
        elif watched.tokens or work.method:
            self._settle(work, module, flops.by_parameters(module, 1), "6pt", "")
        else:
            self._seen.float16 |= _dtype_of(module) == "float16"
            watched.flops_per_unit = 0.0
            self.uncounted = "compiled" if flops.anything_compiled() else "uncountable"

    def _settle(
        self, work: _ModelWork, module: nn.Module, per_unit: float, method: str, dtype: str
    ) -> None:
        """A figure of this model is known."""
        watched = work.watched
        watched.flops_per_unit, watched.by_samples = per_unit, method == "given"
        # With the first one: the forwards before this one are taken to be like it.
        self._work.flops += watched.flops * (watched.forwards if work.per_unit is None else 1)
        self._work.flops_method = method
        if method != "given":
            work.method, work.per_unit = method, per_unit
        word = dtype or _dtype_of(module)
        self._seen.float16 |= word == "float16"
        self._recorder.documents.facts({"precision": word})
        if (device := self.device) is not None:
            # A device without a module or a name has no known peak.
            name = errors.attempt(lambda: str(module_of(device).get_device_name(device)), "")
            if (most := peak(name, word)) is not None:
                self._recorder.totals.stamp(
                    catalog.TRAINING_FLOPS_PEAK, most, dtype=word, device=name
                )

    def check_again(self) -> None:
        """Check each model's figure at its next forward."""
        for key, work in list(self._works.items()):
            if work.watched.model() is None:
                del self._works[key]
            elif work.per_unit is not None:
                # Without a figure, the stepper reports its next forward.
                work.watched.flops_per_unit = None

    def interrupt(self) -> None:
        """End a count that an interruption has left: no hook was called then."""
        self._counter.stop()

    def close(self) -> None:
        """Count nothing any more."""
        self._counter.close()


def _trained(module: nn.Module) -> bytes:
    return bytes(each.requires_grad for each in module.parameters())


def _dtype_of(module: nn.Module) -> str:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return "float32"
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")
