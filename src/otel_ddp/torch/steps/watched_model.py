"""A model whose steps are measured; counts the samples and tokens of its inputs.

Samples and tokens are counted by the shapes of inputs, never by values.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from otel_ddp.recording.steps import Work
from otel_ddp.torch import inspection, models
from otel_ddp.torch.inspection import outward


class WatchedModel:
    """A watched model. Dictionaries use its id as key: a weak dictionary is four times slower."""

    def __init__(self, model: nn.Module, among: dict[int, WatchedModel]) -> None:
        # A weak reference, as the model may fill most of a device's memory. Its callback must not
        # be a Python function: an exception that a signal handler raises in one would be lost.
        self.model = ref(model, partial(among.pop, id(model)))
        # Whether the model was called outside of compiled code, so that its hooks run.
        self.called = False
        # Whether the model may be a part of a compiled graph, so that its hooks must not change.
        self.in_graph = False
        # Whether a forward of this model may broadcast buffers to all ranks.
        self.syncs_buffers = False
        # The model inside of wrappers: a loop may call `train()` or `eval()` on it alone.
        self.inside = ref(models.unwrapped(model))
        # Whether the model is or contains a DDP, which averages gradients over ranks. The DDP may
        # be wrapped by torch.compile or by a module that computes a loss.
        self.is_ddp = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        # Whether the model is trained in evaluation mode, which freezes its batch statistics.
        self.trains_in_eval = False
        # Whether the inputs of the last forward are counted: only the first model of a step counts.
        self.counted = True
        # FLOPs of forward and backward, per token, or per sample if the user has passed
        # `flops_per_sample`. None: not estimated yet; 0: cannot be estimated.
        self.flops_per_unit: float | None = None
        self.by_samples = False
        # Whether other ranks work on the same samples; then no rank counts them.
        self.shared = False
        # Samples and tokens of the last forward.
        self.samples = self.tokens = 0

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, work: Work) -> None:
        """A training forward begins: count its inputs, and add its FLOPs to the work."""
        self.samples, self.tokens = workload(args, kwargs)
        work.flops += self.flops

    @property
    def flops(self) -> float:
        """FLOPs of the last forward and its backward; 0 if unknown."""
        units = self.samples if self.by_samples else self.tokens
        return (self.flops_per_unit or 0.0) * units


# Argument names of language models' token tensors.
_TOKEN_NAMES = ("input_ids", "tokens", "idx")
_WHOLE = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
_MOST = 16
_Tensor = torch.Tensor

# Private in torch, so looked up by name. Without it, batches inside `vmap` are miscounted.
in_functorch = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def workload(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    """Samples and tokens of one forward; 0 for each that the shapes do not show."""
    if in_functorch():
        return 0, 0  # inside `vmap`, shapes lack the batch dimension
    # Most models are called with `input_ids=`, or with a single argument: no search is needed.
    only: Any = None
    if kwargs:
        only = kwargs.get("input_ids")
    elif len(args) == 1:
        only = args[0]
    if type(only) is _Tensor and (shape := only.shape) and type(samples := shape[0]) is int:
        if len(shape) == 2 and only.dtype in _WHOLE:
            return samples, samples * shape[1]
        if not kwargs:
            return samples, 0
    samples, tokens = _searched(args, kwargs)
    # While a model is traced, sizes are tensors, and the counts are unknown.
    return (samples, tokens) if type(samples) is type(tokens) is int else (0, 0)


def shares_its_batch(module: nn.Module) -> bool:
    """Whether other ranks work on the same samples. Call it in a forward: it inspects the stack."""
    return _in_a_pipeline() or _is_split(module)


def _in_a_pipeline() -> bool:
    """Whether a torch pipeline is calling this model, as one of its stages."""
    name = "torch.distributed.pipelining"
    if name not in sys.modules:
        return False
    return any(
        str(frame.f_globals.get("__name__")).startswith(name) for frame in outward(sys._getframe())
    )


def _is_split(module: nn.Module) -> bool:
    """Whether several ranks compute this model's products together."""
    distributed = [each for each in module.parameters() if hasattr(each, "placements")]
    if not distributed:
        return False
    # By name, to avoid importing FSDP.
    sharded = {
        id(parameter)
        for each in module.modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(each).__mro__)
        for parameter in each.parameters()
    }
    return any(_is_beyond_fsdp(each, id(each) in sharded) for each in distributed)


def _is_beyond_fsdp(parameter: Any, sharded: bool) -> bool:
    mesh = parameter.device_mesh
    if mesh.size() == 1:
        return False
    if not sharded:
        return True
    # FSDP alone shards over a mesh of one dimension, or of two if the first one replicates (HSDP).
    # Any further dimension means that matrix products are split over ranks.
    if mesh.ndim == 2:
        return bool(mesh.size(1) > 1 and not parameter.placements[0].is_replicate())
    return bool(mesh.ndim > 2)


def _searched(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    given = [*args, *kwargs.values()] if kwargs else args
    # Dictionaries in a list hold columns of the same samples, as in contrastive learning.
    columns = next((each for each in given[:_MOST] if _holds_columns(each)), None)
    if columns is not None:
        found = [_counted((each,), None) for each in columns[:_MOST]]
        return found[0][0], sum(tokens for _, tokens in found)
    return _counted(args, kwargs)


def _holds_columns(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and _is_batch(type(value[0]))


def _is_batch(kind: type) -> bool:
    return issubclass(kind, dict) or inspection.is_mapping(kind)


def _counted(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    fractions = others = 0
    words: Any = None
    for name, tensor in _tensors(args, kwargs):
        shape = inspection.of_tensor(tensor, "shape")
        dtype = inspection.of_tensor(tensor, "dtype")
        if not shape:
            continue
        if dtype in _WHOLE and name in _TOKEN_NAMES:
            # With one dimension, sequences are packed, and their number is unknown.
            return (shape[0] if len(shape) > 1 else 0), shape.numel()
        if dtype.is_floating_point or dtype.is_complex:
            fractions = fractions or shape[0]
        elif dtype in _WHOLE and len(shape) == 2 and words is None:
            words = shape
        else:
            others = others or shape[0]
    if fractions:
        # Count no tokens: integers beside floats may be labels, or the edges of a graph.
        return fractions, 0
    if words is None:
        return others, 0
    return words[0], words.numel()


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """The tensors among the inputs and in containers among them, one level deep, with names."""
    given = [*(("", each) for each in args), *(kwargs.items() if kwargs else ())]
    for name, value in given[:_MOST]:
        kind = type(value)
        if issubclass(kind, _Tensor):
            yield name, value
        elif _is_batch(kind):
            for key, inner in islice(inspection.items(value), _MOST):
                if issubclass(type(inner), _Tensor):
                    yield key, inner
        elif kind in (list, tuple):
            for inner in value[:_MOST]:
                if issubclass(type(inner), _Tensor):
                    yield name, inner


# -- the samples of a step: one batch per backward

# Limit of forwards that wait for their backward, in case none follows. A pipeline has fewer
# micro-batches in flight.
_MOST_UNDER_WAY = 1024


class Batches:
    """Counts the samples of a step, one batch per backward: a siamese network or a critic is called
    several times per batch."""

    def __init__(self, work: Work) -> None:
        self._work = work
        # The first model called in the step; only its inputs are counted, as an encoder and its
        # decoder work on one batch.
        self.model: WatchedModel | None = None
        # Whether a forward has run since the last backward, so that a batch is counted already.
        self.awaits = False
        # Samples of each further forward since the last backward. They are counted when this
        # forward's own backward follows, as in a pipeline.
        self._late: deque[int] = deque(maxlen=_MOST_UNDER_WAY)

    def forward_begins(self, watched: WatchedModel) -> None:
        """A training forward begins: count its batch."""
        if not watched.counted:
            self.awaits = True
            return
        self._work.tokens += watched.tokens
        if self.awaits:
            self._late.append(watched.samples)
        else:
            self.awaits = True
            self._work.samples += watched.samples

    def backward_ended(self) -> None:
        """A backward has ended."""
        if self.awaits:
            self.awaits = False
        elif self._late:
            self._work.samples += self._late.popleft()

    def no_backward_seen(self) -> None:
        """A step ends in which hooks have seen no backward: count each forward as a batch."""
        self._work.samples += sum(self._late)

    def step_ended(self) -> None:
        """A training step has ended."""
        self.model = None
        self.awaits = False
        self._late.clear()
