"""What is read between steps: its value, its step, on which rank, and how often."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

import otel_ddp
from conftest import Here, Journal
from measured import Measured
from otel_ddp.torch import measure
from otel_ddp.torch.readings import loss as step_loss
from otel_ddp.torch.steps.watched_model import shares_its_batch
from otel_ddp.vocabulary import catalog

pytestmark = pytest.mark.timed

INPUT = torch.ones(8, 4)
WORDS = torch.ones(2, 5, dtype=torch.long)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


class Loss(nn.Linear):
    """A model that returns its loss."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).square().mean()


class Seen:
    """What a loop knows of each of its steps."""

    def __init__(self) -> None:
        self.found: dict[str, dict[int, float]] = {}

    def note(self, step: int, **found: Any) -> None:
        for name, value in found.items():
            self.found.setdefault(name, {})[step] = float(value)


def train(model: nn.Module, steps: int = 6, scaler: Any = None, first: int = 1) -> Seen:
    """Learns with another rate in each step."""
    seen = Seen()
    optimizer = SGD(model.parameters(), lr=0.0)
    for step in range(first, first + steps):
        rate = optimizer.param_groups[0]["lr"] = 0.01 * step
        optimizer.zero_grad()
        loss = model(INPUT)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        norm = get_total_norm([p.grad for p in model.parameters() if p.requires_grad])
        seen.note(step, learning_rate=rate, loss=loss.detach(), grad_norm=norm)
        if scaler is None:
            optimizer.step()
        else:
            seen.note(step, loss_scale=scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
    return seen


def test_what_is_read_is_that_of_its_step(place: Here) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "3"
    model = Loss(4, 1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    otel_ddp.instrument(model, scaler=scaler)

    seen = train(model, 9, scaler)
    otel_ddp.finish()

    found = place.only().curves
    assert found.keys() == {"learning_rate", "grad_norm", "loss_scale"}
    # The first step is flushed, and every third is sampled; more only where a quarter of a second
    # has gone by.
    assert found["grad_norm"].keys() == {3, 6, 9}
    assert found["learning_rate"].keys() >= {1, 3, 6, 9}
    for name, points in found.items():
        assert points == pytest.approx({step: seen.found[name][step] for step in points}), name


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Measured]:
    found = Measured(tmp_path)
    yield found
    found.close()


def tenths_of_a_second(measured: Measured, model: nn.Module, steps: int) -> None:
    """Trains: each step takes one, so that every third is flushed. None is sampled."""
    measured.instrument(model)
    assert measure._current is not None
    measure._current.stepper.sampled.sample_every(0)
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(INPUT).mean().backward()
        measured.now_ns += 10**8
        optimizer.step()


def test_what_changes_slowly_is_read_at_each_flush_and_then_once_a_second(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loss, "_STEPS_TO_WITHHOLD", 0)
    tenths_of_a_second(measured, Loss(4, 1), 120)

    journal = Journal(measured.recorder.writer.path)
    assert journal.steps_of("learning_rate") == [*range(1, 60, 3), *range(70, 120, 12)]
    # The loss is that of the step after each flush: the one in which it is lost has to be known.
    assert journal.steps_of("loss") == [*range(2, 118, 3)]


def test_a_short_training_has_a_norm_of_its_gradients(place: Here) -> None:
    model = Loss(4, 1)
    otel_ddp.instrument(model)

    train(model, 40)
    otel_ddp.finish()

    assert place.only().curves["grad_norm"].keys() == {34}


def test_what_ranks_have_in_common_is_recorded_by_rank_0(place: Here) -> None:
    os.environ.update(OTEL_DDP_SAMPLE_STEPS="1", OTEL_DDP_RANK="1", OTEL_DDP_WORLD_SIZE="2")
    model = Loss(4, 1)
    scaler = torch.amp.GradScaler("cpu")
    otel_ddp.instrument(model, scaler=scaler)

    scaler.scale(torch.ones(()))
    train(model, 3)
    otel_ddp.finish()

    assert place.only().curves.keys() == {"loss"}


def test_a_name_that_the_user_logs_is_the_users(place: Here) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = Loss(4, 1)
    run = otel_ddp.instrument(model)

    train(model, 2)
    run.log({"learning_rate": 7.0, "loss": 8.0})
    train(model, 3)
    otel_ddp.finish()

    points = place.only().points
    logged = points.index(("learning_rate", 7.0))
    assert ("learning_rate", 0.01) in points[:logged]
    # Only what the user does not log goes on.
    assert {name for name, _ in points[logged:]} == {"learning_rate", "loss", "grad_norm"}
    assert [name for name, _ in points[logged:]].count("learning_rate") == 1
    assert [name for name, _ in points[logged:]].count("loss") == 1


def flops(place: Here) -> dict[str, float]:
    return {
        total.attributes["method"]: total.values[0]
        for total in place.only().all_totals
        if total.metric == "training.flops"
    }


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def learn(model: Any, batch: torch.Tensor, steps: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(batch).sum().backward()
        optimizer.step()


def test_flops_are_taken_from_parameters_and_tokens(place: Here) -> None:
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 3))
    otel_ddp.instrument(model)

    learn(model, WORDS, 5)
    otel_ddp.finish()

    # A lookup multiplies nothing.
    assert flops(place) == {"6pt": 6 * (4 * 3 + 3) * WORDS.numel() * 5}
    assert place.only().facts["precision"] == "float32"


def test_packed_sequences_have_tokens_and_no_samples(place: Here) -> None:
    class Packed(nn.Embedding):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)

    model = Packed(16, 4)
    otel_ddp.instrument(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(input_ids=WORDS.flatten()).sum().backward()
        optimizer.step()
    otel_ddp.finish()

    assert place.only().total(catalog.TRAINING_TOKENS) == 50
    assert place.only().facts["capability"]["samples"] == "packed"


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def split(model: nn.Module, mesh: Any) -> nn.Module:
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    return parallel.parallelize_module(model, mesh, {"0": columns, "2": rows})


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    return pytest.importorskip("torch.distributed.fsdp").fully_shard(model, mesh=mesh)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("shape", "wrap", "shared"),
    [
        ((4,), lambda model, mesh: model, False),
        ((4,), lambda model, mesh: DistributedDataParallel(model), False),
        ((4,), sharded, False),
        ((2, 2), sharded, False),
        ((4,), split, True),
        ((4,), lambda model, mesh: nn.Sequential(sharded(mlp(), mesh), split(model, mesh)), True),
        ((2, 2), lambda model, mesh: sharded(split(model, mesh["b"]), mesh["a"]), True),
        ((4, 1), lambda model, mesh: sharded(split(model, mesh["b"]), mesh["a"]), False),
    ],
    ids=["plain", "DDP", "FSDP", "HSDP", "TP", "both beside", "both", "TP of one rank"],
)
def test_a_shared_batch_is_known_from_the_layout_of_the_parameters(
    shape: tuple[int, ...], wrap: Any, shared: bool
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])

    assert shares_its_batch(wrap(mlp(), mesh)) is shared


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("given", [None, 100.0])
def test_ranks_that_share_a_batch_tell_no_samples_of_their_own(
    place: Here, given: float | None
) -> None:
    model = nn.Sequential(nn.Embedding(16, 4), split(mlp(), init_device_mesh("cpu", (4,))))
    otel_ddp.instrument(model, flops_per_sample=given)
    optimizer = SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(5):
        model(WORDS).sum().backward()
        optimizer.step()
    otel_ddp.finish()

    journal = place.only()
    silent = [catalog.TRAINING_SAMPLES, catalog.TRAINING_TOKENS]
    assert [journal.total(each) for each in silent] == [0, 0]
    # What the user says of it is believed.
    assert flops(place) == ({} if given is None else {"given": 5 * 2 * 100.0})
    found = {what for what, why in journal.facts["capability"].items() if why == "shared_batch"}
    assert found == {"samples", "tokens", *(("flops",) if given is None else ())}


def test_stages_of_a_pipeline_tell_no_samples_of_their_own(place: Here, alone: None) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    model = mlp()
    otel_ddp.instrument(model)
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda output, _: output.sum())
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        schedule.step(INPUT, target=torch.ones(8, 1))
        optimizer.step()
    otel_ddp.finish()

    journal = place.only()
    assert journal.total(catalog.TRAINING_MICRO_BATCHES) >= 8
    assert (journal.total(catalog.TRAINING_SAMPLES), flops(place)) == (0, {})
    assert journal.facts["capability"]["samples"] == "shared_batch"


def test_a_missing_optimizer_is_reported_after_512_backwards(place: Here) -> None:
    model = mlp()
    otel_ddp.instrument(model)

    for _ in range(511):
        model(INPUT).sum().backward()
    before = place.only().facts
    model(INPUT).sum().backward()

    assert "capability" not in before
    assert place.only().facts["capability"]["optimizer"] == "no_optimizer"


@pytest.mark.parametrize("reading", ["forward_ended", "optimizer_steps", "step_ended"])
def test_a_reading_that_fails_costs_no_step(
    place: Here, reading: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = mlp()
    otel_ddp.instrument(model)
    assert measure._current is not None
    stepper = measure._current.stepper
    tried = []

    def fails(*args: Any) -> None:
        tried.append(args)
        raise RuntimeError("no such reading")

    fails.__name__ = reading
    setattr(stepper.sampled.readings, reading, fails)
    learn(model, INPUT, 20)
    otel_ddp.finish()

    assert len(tried) == 3
    assert caplog.text.count(f"{reading} failed") == 1
    (steps,) = (t.values[0] for t in place.only().all_totals if t.metric == "training.steps")
    assert steps == 20


def test_an_optimizer_that_the_user_deletes_is_freed(place: Here) -> None:
    import gc
    from weakref import ref

    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    otel_ddp.instrument(model, optimizer=optimizer, step_optimizer=optimizer)
    model(INPUT).sum().backward()
    optimizer.step()

    held = ref(optimizer)
    del optimizer
    gc.collect()

    assert held() is None
