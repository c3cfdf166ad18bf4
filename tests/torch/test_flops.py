"""FLOPs by parameters and tokens, and the peak of the device that they are compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from otel_ddp.recording.steps import Work
from otel_ddp.torch.readings.flops import ModelFlops, by_parameters
from otel_ddp.torch.steps.watched_model import WatchedModel

WORDS = torch.ones(2, 5, dtype=torch.long)


def embedded() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 100))


def settled(model: nn.Module, device: str = "cpu", given: float | None = None) -> tuple[Any, Any]:
    """The model after its first forward, and what is recorded of it."""
    progress = SimpleNamespace(work=Work(), recorder=Mock())
    readings = ModelFlops(cast("Any", progress))
    readings.device, readings.given_per_sample = torch.device(device), given
    watched = WatchedModel(model, {})

    readings.forward_began(watched, model)
    watched.take((WORDS,), {}, progress.work)
    readings.forward_ended(watched, model)
    return watched, progress


def test_parameters_give_the_usual_estimate() -> None:
    model = embedded()
    model[1].requires_grad_(False)

    assert by_parameters(model) == 2 * 64 + 6 * 900

    # The same table at both ends: the output multiplies with it.
    model[0].weight = model[2].weight
    assert by_parameters(model) == 2 * 64 + 6 * 900
    assert by_parameters(nn.Embedding(100, 8)) == 0


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_has_the_parameters_of_all_ranks() -> None:
    model = embedded()
    expected = by_parameters(model)

    watched, progress = settled(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))

    assert (watched.flops_per_unit, progress.work.flops) == (expected, expected * WORDS.numel())


class FullyShardedDataParallel(nn.Module):
    """FSDP1 by its name: flat parameters, of which each rank holds a part."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.ones(8))


class Zero3(nn.Module):
    """A rank of DeepSpeed's between two forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(0))


@pytest.mark.parametrize("make", [FullyShardedDataParallel, Zero3])
def test_a_rank_that_holds_shards_estimates_nothing(make: Any) -> None:
    watched, progress = settled(nn.Sequential(make()))

    assert (watched.flops_per_unit, progress.work.flops) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("module", "peaks"),
    [
        ({"get_device_name": lambda _: "AMD Instinct MI300X"}, [("AMD Instinct MI300X", 163.4e12)]),
        ({"get_device_name": lambda _: 1 // 0}, []),
        ({}, []),
        (None, []),
    ],
)
def test_a_device_is_asked_for_its_name_whatever_its_type(
    module: Any, peaks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module is not None:
        device = SimpleNamespace(Event=object, **module)
        monkeypatch.setattr(torch, "meta", device, raising=False)

    watched, progress = settled(embedded(), "meta", given=6.0)

    assert watched.flops_per_unit == 6.0
    stamps = progress.recorder.totals.stamp.call_args_list
    assert [(each.kwargs["device"], each.args[1]) for each in stamps] == peaks
