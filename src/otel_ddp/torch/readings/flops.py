"""Estimates the FLOPs of a model from parameters and tokens, unless the user passes them."""

from __future__ import annotations

import torch
from torch import nn

from otel_ddp import errors
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.torch.readings.devices import peak
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.watched_model import WatchedModel, shares_its_batch
from otel_ddp.vocabulary import catalog


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
        self.any_float16 = False
        """Whether one of them computes in float16."""

    def forward_began(self, watched: WatchedModel, module: nn.Module) -> None:
        """A training forward of a model whose FLOPs are not settled."""
        watched.shared = shares_its_batch(module)
        self.any_shared |= watched.shared

    def forward_ended(self, watched: WatchedModel, module: nn.Module) -> None:
        """The same forward has returned."""
        word = _dtype_of(module)
        self.any_float16 |= word == "float16"
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
