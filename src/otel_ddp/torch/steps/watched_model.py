"""A model whose steps are measured, and the samples and tokens that it works on.

They come from the shapes of inputs, never from values.
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
    """A watched model. It is found by its id, as a weak dictionary takes four times as long."""

    def __init__(self, model: nn.Module, among: dict[int, WatchedModel]) -> None:
        # Weakly: it holds most of a device's memory. The callback must not be a Python function: an
        # exception of a signal handler in it would be lost.
        self.model = ref(model, partial(among.pop, id(model)))
        # Whether it was called outside of compiled code, so that its hooks run.
        self.called = False
        # Whether it may be a part of a compiled graph, so that its hooks must not change.
        self.in_graph = False
        # Whether a forward may broadcast buffers to all ranks.
        self.syncs_buffers = False
        # The model inside of wrappers: a loop may call `train()` or `eval()` on it alone.
        self.inside = ref(models.unwrapped(model))
        # torch.compile and modules that compute a loss wrap a DDP, too.
        # Whether it is or contains a DDP, which averages gradients over ranks.
        self.is_ddp = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        # Whether it is trained in evaluation mode, to freeze its batch statistics.
        self.trains_in_eval = False
        # Whether the batch of its last forward may be the step's batch.
        self.counted = True
        # Forward and backward, per token, or per sample if the user passes that.
        # None: not known yet; 0: cannot be known.
        self.flops_per_unit: float | None = None
        self.by_samples = False
        # Whether other ranks work on the same samples, so that none of them counts them.
        self.shared = False
        # Of the last forward.
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

# Private, so looked up by name: without one, only the features that need it are missing.
in_functorch = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def workload(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    """Samples and tokens of one forward; 0 for what the shapes do not show."""
    if in_functorch():
        return 0, 0  # inside `vmap`, no shape shows the batch
    # Most models are called in one of these two ways, which need no search.
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
    # While tracing, sizes are tensors.
    return (samples, tokens) if type(samples) is type(tokens) is int else (0, 0)


def shares_its_batch(module: nn.Module) -> bool:
    """Whether other ranks work on the same samples. To be called at the start of a forward."""
    return _in_a_pipeline() or _is_split(module)


def _in_a_pipeline() -> bool:
    """Whether the caller is a stage of a torch pipeline."""
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
    # FSDP shards over one dimension of the mesh, or over two of which the first replicates. Any
    # other dimension splits matrix products.
    if mesh.ndim == 2:
        return bool(mesh.size(1) > 1 and not parameter.placements[0].is_replicate())
    return bool(mesh.ndim > 2)


def _searched(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    given = [*args, *kwargs.values()] if kwargs else args
    # A list of dictionaries holds columns of the same samples, as in contrastive learning.
    columns = next((each for each in given[:_MOST] if _holds_columns(each)), None)
    if columns is not None:
        found = [_counted((each,), None) for each in columns[:_MOST]]
        return found[0][0], sum(tokens for _, tokens in found)
    return _counted(args, kwargs)


def _holds_columns(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and _is_batch(type(value[0]))


def _is_batch(kind: type) -> bool:
    return issubclass(kind, dict) or inspection.maps(kind)


def _counted(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[int, int]:
    fractions = others = 0
    words: Any = None
    for name, tensor in _tensors(args, kwargs):
        shape = inspection.of_tensor(tensor, "shape")
        dtype = inspection.of_tensor(tensor, "dtype")
        if not shape:
            continue
        if dtype in _WHOLE and name in _TOKEN_NAMES:
            # One dimension: packed sequences of any length.
            return (shape[0] if len(shape) > 1 else 0), shape.numel()
        if dtype.is_floating_point or dtype.is_complex:
            fractions = fractions or shape[0]
        elif dtype in _WHOLE and len(shape) == 2 and words is None:
            words = shape
        else:
            others = others or shape[0]
    if fractions:
        # Integers beside floats may be labels, or the edges of a graph.
        return fractions, 0
    if words is None:
        return others, 0
    return words[0], words.numel()


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """The tensors among the inputs, and one level into containers."""
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

# More than the micro-batches in flight in a pipeline. Bounded, in case no backward follows.
_MOST_UNDER_WAY = 1024


class Batches:
    """Counts the samples of a step: a siamese network or a critic is called several times per
    batch."""

    def __init__(self, work: Work) -> None:
        self._work = work
        # The first model called in the step: an encoder and its decoder work on one batch.
        self.model: WatchedModel | None = None
        # Whether a forward has run since the last backward; the next backward uses its batch.
        self.awaits = False
        # Samples of further forwards: in a pipeline their backwards follow later.
        self._late: deque[int] = deque(maxlen=_MOST_UNDER_WAY)

    def forward_begins(self, watched: WatchedModel) -> None:
        """A training forward begins, whose inputs are counted."""
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
        """A step ends without a backward that hooks could see: count each forward."""
        self._work.samples += sum(self._late)

    def step_ended(self) -> None:
        """A training step has ended."""
        self.model = None
        self.awaits = False
        self._late.clear()
