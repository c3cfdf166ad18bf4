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


class _ModelWork:
    """What is known of the FLOPs of one model."""

    __slots__ = ("basis", "checks", "counts", "method", "per_unit", "shared", "watched")

    def __init__(self, watched: WatchedModel) -> None:
        self.watched = watched  # kept, so that no other one can get its id
        self.shared = False  # whether other ranks work on the same samples
        self.method = ""
        self.per_unit: float | None = None
        # What was counted: which parameters were trained, and the shapes of a sample.
        self.basis: tuple[bytes, Shapes | None] | None = None
        self.counts = self.checks = 0

    @property
    def may_count(self) -> bool:
        # Shapes that differ at every check are counted ever more rarely.
        return self.counts <= self.checks.bit_length()


class ModelFlops:
    """Counts one forward of each model, and checks now and then whether it is still true."""

    def __init__(self, stepper: Stepper) -> None:
        self._seen = stepper.seen
        self._work, self._recorder = stepper.progress.work, stepper.progress.recorder
        self._counter = flops.ForwardCounter()
        self._works: dict[int, _ModelWork] = {}
        self.given_per_sample: float | None = None
        """What the user knows, forward and backward."""
        self.device: torch.device | None = None
        self.uncounted = ""
        """Why the last model that could not be counted was not."""

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
        if work.shared:
            self._leave_out(watched)
        elif work.per_unit is not None:
            work.checks += 1
            self._check(watched, module, work, (_trained(module), shapes(args, kwargs)))
        else:
            watched.forwards += 1
            if watched.forwards != COUNTED_FORWARD:
                return
            if self.given_per_sample is not None:
                self._settle(watched, module, float(self.given_per_sample), "given", "")
            elif flops.countable(module):
                self._count(work, (_trained(module), shapes(args, kwargs)))
            else:
                self._estimate(watched, module)

    def _leave_out(self, watched: WatchedModel) -> None:
        """Each of several ranks would count all of the batch: none does, but for a given figure."""
        watched.forwards += 1
        watched.counted = False
        if self.given_per_sample is not None:
            self._work.flops_method = "given"
            self._work.flops += float(self.given_per_sample) * watched.samples

    def _check(self, watched: WatchedModel, module: nn.Module, work: _ModelWork, now: Any) -> None:
        """Find the figure anew if what it depends on has changed."""
        if work.method == "6pt":
            work.per_unit = flops.by_parameters(module, 1)
        elif now != work.basis and work.may_count and flops.countable(module):
            self._count(work, now)
            return
        self._go_on(watched, work)

    def _count(self, work: _ModelWork, basis: Any) -> None:
        work.basis = basis
        work.counts += 1
        self._counter.start()

    def _go_on(self, watched: WatchedModel, work: _ModelWork) -> None:
        watched.flops_per_unit = work.per_unit
        self._work.flops += (work.per_unit or 0.0) * (watched.tokens or watched.samples)

    def forward_ended(self, watched: WatchedModel, module: nn.Module, returned: bool) -> None:
        """The same forward has returned or raised."""
        if not self._counter.active:
            return
        counted = self._counter.stop()
        units = watched.tokens or watched.samples
        work = self._works[id(watched)]
        if not returned:
            # It raised in the middle: the next one is counted.
            work.basis = None
            watched.forwards -= work.per_unit is None
        elif work.per_unit is not None:
            # What cannot be counted any more is taken to be as it was.
            work.per_unit = counted.total / units if counted and units else work.per_unit
            self._go_on(watched, work)
        elif counted is None:
            self._estimate(watched, module)
        elif units:
            self._settle(watched, module, counted.total / units, "counted", counted.dtype)

    def _estimate(self, watched: WatchedModel, module: nn.Module) -> None:
        self._seen.float16 |= _dtype_of(module) == "float16"
        if watched.tokens:
            self._settle(watched, module, flops.by_parameters(module, 1), "6pt", "")
        else:
            watched.flops_per_unit = 0.0
            self.uncounted = "compiled" if flops.anything_compiled() else "uncountable"

    def _settle(
        self, watched: WatchedModel, module: nn.Module, per_unit: float, method: str, dtype: str
    ) -> None:
        """The first figure of this model is known."""
        watched.flops_per_unit = per_unit
        watched.by_samples = method == "given"
        self._work.flops_method = method
        if method != "given":
            work = self._works[id(watched)]
            work.method, work.per_unit = method, per_unit
        units = watched.samples if watched.by_samples else watched.tokens or watched.samples
        # The forwards before this one are taken to be like it.
        self._work.flops += per_unit * units * watched.forwards
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
