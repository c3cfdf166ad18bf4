"""Finds which capabilities a run measures, and why others are missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from otel_ddp.torch import inspection
from otel_ddp.torch.hooks.model import differentiable
from otel_ddp.torch.process_group import is_up
from otel_ddp.torch.steps.stepper import Stepper

# Reasons that are not shown to users: most loops log a loss themselves, if perhaps only later.
NO_LOSS = ("no_loss", "scaled_loss", "several_losses")
# Name of the autograd node of reentrant checkpointing.
_REENTRANT = "CheckpointFunctionBackward"
_MOST_NODES = 20_000
# Not shown to users, either: FLOPs of nearly all but language models need `flops_per_sample`.
_UNCOUNTABLE = "uncountable"

# Reason -> the sentence that users see.
REASONS: Mapping[str, str] = {
    "": "",
    "not_called": "no call of the model is seen: it was compiled after instrument(), which must be "
    "called last, or the loop calls one of its methods",
    "replayed": "the step is replayed as one CUDA graph: its time on the device is measured as the "
    "phase graph, without the phases inside",
    "outputs_unknown": "no tensor with a gradient is found in the model's outputs, or backward is "
    "compiled",
    "no_optimizer": "no step is counted: no torch optimizer, nor one inside a wrapper, steps this "
    "model's parameters, or the optimizer's whole step is compiled",
    "no_loader": "the thread that trains uses no torch DataLoader: wrap its source of batches in "
    "otel_ddp.data()",
    "shapes_unknown": "no tensor is found in the model's inputs",
    "fsdp": "FSDP waits inside forward and backward",
    "sync_batch_norm": "SyncBatchNorm waits inside forward and backward",
    "tensor_parallel": "tensor parallelism waits inside forward and backward",
    "reentrant_checkpoint": "reentrant checkpointing makes DDP wait inside backward",
    "replica_groups": "torchft's replica groups wait for each other inside backward, and between "
    "the phases",
    "sends": "sends and receives, as in a pipeline, make ranks wait in any phase",
    "no_ddp": "several ranks without DistributedDataParallel: they wait in the program's own "
    "collectives, in unknown steps and phases",
    "no_loss": "backward does not begin at a single number: log the loss where you compute it",
    "scaled_loss": "backward begins at a multiple or a share of the loss: log the loss where you "
    "compute it",
    "several_losses": "several optimizers step in turn, each with its own loss: log the losses "
    "where you compute them",
    "packed": "sequences packed into one dimension are counted as tokens, but not as samples",
    "shared_batch": "tensor or pipeline parallelism: several ranks work on the same batch, so a "
    "sum over ranks would count it several times; for FLOPs, pass this rank's share as "
    "instrument(flops_per_sample=...)",
    _UNCOUNTABLE: "without tokens, or with parameters in shards (FSDP1, ZeRO-3), FLOPs are not "
    "estimated: pass instrument(flops_per_sample=...)",
    "device_unknown": "this device has no events that can be queried without waiting for it",
    "device_failed": "the device's clock failed",
    "no_statistics": "torch has no statistics of this device's allocator",
    "no_counts": "this device's allocator counts neither retries nor out-of-memory errors",
}


def measured(
    models: list[nn.Module], stepper: Stepper, world_size: int, hidden_waits: str
) -> dict[str, str]:
    """Capability -> the reason why it is missing (a key of `REASONS`), or "" if it is measured.

    *hidden_waits*: the reason if DDP waits outside of `comm_wait`.
    """
    found: dict[str, str] = {}
    steps, work = stepper.progress.steps, stepper.progress.work
    seen, backward = work.forwards > 0, work.micro_batches > 0
    found["optimizer"] = "" if steps.count else "no_optimizer"
    found["forward"] = "" if seen else "not_called"
    found["backward"] = "" if backward else "outputs_unknown" if seen else "not_called"
    found["comm_wait"] = (
        _comm_wait(models, world_size, hidden_waits, stepper.group_calls.waits_seen)
        if backward
        else found["backward"]
    )
    if stepper.replays:
        found |= dict.fromkeys(("forward", "backward", "comm_wait"), "replayed")
    if stepper.group_calls.noted:
        found["calls"] = ""
    # This may change with later batches: the training thread may be unknown at the first one.
    is_own = stepper.loads and stepper.load_thread == stepper.progress.thread
    found["data"] = "" if is_own else "no_loader"
    found["samples"] = "" if work.samples else "shapes_unknown" if seen else "not_called"
    found["flops"] = "" if work.flops else _UNCOUNTABLE if seen else "not_called"
    if stepper.end.has_scaler:
        found["skipped_steps"] = ""
    return found


def _comm_wait(
    models: list[nn.Module], world_size: int, hidden_waits: str, waits_seen: bool
) -> str:
    if os.environ.get("TORCHFT_LIGHTHOUSE"):
        return "replica_groups"
    if world_size <= 1:
        return ""
    if any(map(shards, models)):
        return hidden_waits if waits_seen else "fsdp"
    if any(isinstance(e, nn.SyncBatchNorm) for model in models for e in model.modules()):
        return "sync_batch_norm"
    if any(hasattr(each, "placements") for model in models for each in model.parameters()):
        return "tensor_parallel"
    if not any(True for model in models for _ in inspection.ddps_in(model)):
        return "no_ddp"
    return hidden_waits


def shards(model: nn.Module) -> bool:
    """Whether FSDP shards a module of this model."""
    return any(map(is_sharded, model.modules()))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP shards this module."""
    # By name, to avoid importing FSDP.
    return any(
        base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__
    )


def checkpoints_reentrantly(output: Any) -> bool:
    """Whether this output's graph has reentrant checkpointing, which runs nested backwards."""
    left: list[Any] = [inspection.of_tensor(each, "grad_fn") for each in differentiable(output)]
    known: set[Any] = set()
    while left and len(known) < _MOST_NODES:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node.name() == _REENTRANT:
            return True
        left += [each for each, _ in node.next_functions]
    return False


def sentences(found: Mapping[str, str]) -> Iterator[str]:
    """Yields one sentence per reason, for people, with the capabilities that it makes missing."""
    reasons: dict[str, list[str]] = {}
    for what, reason in found.items():
        if reason and reason not in (*NO_LOSS, _UNCOUNTABLE):
            reasons.setdefault(reason, []).append(what)
    # A missing `comm_wait` suggests that late ranks are not found: say that they are.
    by_calls = "; within a node a late rank is found by its calls to process groups"
    for reason, missing in reasons.items():
        noted = found.get("calls") == "" and reason != "replica_groups"
        more = by_calls if "comm_wait" in missing and noted else ""
        yield f"{', '.join(missing)} ({REASONS[reason]}{more})"


def world_size() -> int:
    """The size of the process group; 1 without one."""
    return int(sys.modules["torch.distributed"].get_world_size()) if is_up() else 1


def rank() -> int:
    """The rank in the process group; 0 without one."""
    return int(sys.modules["torch.distributed"].get_rank()) if is_up() else 0
