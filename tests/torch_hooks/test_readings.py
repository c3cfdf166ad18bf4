"""What is read off between steps: its value, its step, who says it, and how often."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import otel_ddp
from conftest import Here
from otel_ddp.torch import watch
from otel_ddp.torch.gradient_norm import square_norm
from otel_ddp.torch.stepper import Stepper

INPUT = torch.ones(8, 4)
WORDS = torch.ones(2, 5, dtype=torch.long)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """What is compiled by then rules counting out."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
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


def written(place: Here) -> dict[str, dict[int, float]]:
    """The logged points: name, step, value."""
    journal = place.only()
    found: dict[str, dict[int, float]] = {}
    for call in journal.calls:
        for number, value in call.values:
            found.setdefault(journal.names[number].text, {})[call.step] = value
    return found


def test_what_is_read_is_that_of_its_step(place: Here) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "3"
    model = Loss(4, 1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    otel_ddp.instrument(model, scaler=scaler)

    seen = train(model, 9, scaler)
    otel_ddp.finish()

    found = written(place)
    assert found.keys() == {"learning_rate", "loss", "grad_norm", "loss_scale"}
    # The first step is told, and every third is looked at; more only where a tenth of a second
    # has gone by.
    assert found["grad_norm"].keys() == {3, 6, 9}
    assert found["learning_rate"].keys() >= {1, 3, 6, 9}
    # A loss is taken from the first forward after it was asked for.
    assert found["loss"].keys() >= {2, 4, 7}
    for name, points in found.items():
        assert points == pytest.approx({step: seen.found[name][step] for step in points}), name


@pytest.mark.parametrize("every", [0, 3])
def test_only_steps_looked_at_have_a_norm(place: Here, every: int) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = str(every)
    model = Loss(4, 1)
    otel_ddp.instrument(model)

    train(model, 7)
    otel_ddp.finish()

    assert written(place).get("grad_norm", {}).keys() == ({3, 6} if every else set())


def test_the_norm_is_torchs_own(place: Here) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Loss(4, 1), nn.Identity())
    model[0].bias.requires_grad_(False)
    otel_ddp.instrument(model)

    seen = train(model, 3)
    otel_ddp.finish()

    # Whether the first step is one is known only after a step.
    assert written(place)["grad_norm"] == pytest.approx(
        {step: seen.found["grad_norm"][step] for step in (2, 3)}
    )


def test_what_ranks_have_in_common_is_said_by_rank_0(place: Here) -> None:
    os.environ.update(OTEL_DDP_SAMPLE_STEPS="1", OTEL_DDP_RANK="1", OTEL_DDP_WORLD_SIZE="2")
    model = Loss(4, 1)
    scaler = torch.amp.GradScaler("cpu")
    otel_ddp.instrument(model, scaler=scaler)

    train(model, 3, scaler)
    otel_ddp.finish()

    assert written(place).keys() == {"loss"}


def test_a_rank_that_is_known_only_later_is_heeded(place: Here) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = Loss(4, 1)
    otel_ddp.instrument(model)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        train(model, 3)
        otel_ddp.finish()
    finally:
        dist.destroy_process_group()

    assert written(place).keys() == {"loss"}


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


def counted(model: nn.Module, batch: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    return float(counter.get_total_flops())


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


@pytest.mark.parametrize("steps", [2, 5])
def test_counted_flops_include_the_steps_before_they_were_counted(place: Here, steps: int) -> None:
    model = mlp()
    each = counted(model, INPUT)
    otel_ddp.instrument(model)

    learn(model, INPUT, steps)
    otel_ddp.finish()

    assert flops(place) == {"counted": pytest.approx(steps * each)}
    assert place.only().facts["precision"] == "float32"


def test_flops_that_cannot_be_counted_are_taken_from_parameters_and_tokens(place: Here) -> None:
    layers = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 3))
    model = torch.compile(layers, backend="eager")
    otel_ddp.instrument(model)

    learn(model, WORDS, 5)
    otel_ddp.finish()

    # A lookup multiplies nothing.
    assert flops(place) == {"6pt": 6 * (4 * 3 + 3) * WORDS.numel() * 5}


def test_what_a_model_calls_compiled_is_not_counted_either(place: Here) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def squares(inputs: torch.Tensor) -> torch.Tensor:
        return inputs.square()

    class Calling(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(squares(inputs))

    model = Calling(4, 1)
    otel_ddp.instrument(model)

    learn(model, INPUT, 3)
    otel_ddp.finish()

    assert flops(place) == {}
    assert place.only().facts["capability"]["flops"] == "uncountable"


def test_flops_that_are_given_are_believed(place: Here) -> None:
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 3))
    otel_ddp.instrument(model, flops_per_sample=1000.0)

    learn(model, WORDS, 5)
    otel_ddp.finish()

    # A sample, however many tokens it has.
    assert flops(place) == {"given": 1000.0 * len(WORDS) * 5}


@pytest.mark.parametrize("what", ["in each step", "now and then"])
def test_the_time_that_hooks_take_is_a_part_of_the_loop(
    place: Here, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "in each step":
        # What is done beside them is timed by itself: not here.
        monkeypatch.setattr(
            Stepper, "_aside", lambda stepper, name, *args: getattr(stepper, name)(*args)
        )
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1" if what == "in each step" else "0"
    model = mlp()
    otel_ddp.instrument(model)

    began = time.perf_counter()
    learn(model, INPUT, 200)
    took = time.perf_counter() - began
    otel_ddp.finish()

    (spent,) = (t.values[0] for t in place.only().all_totals if t.metric == "otel_ddp.hook.time")
    assert 0 < spent < took


def test_without_an_optimizer_of_torchs_that_is_said_after_500_backwards(place: Here) -> None:
    model = mlp()
    otel_ddp.instrument(model)

    said = []
    for _ in range(500):
        model(INPUT).sum().backward()
        said.append(place.only().facts.get("capability", {}).get("optimizer"))

    assert said == [None] * 499 + ["no_optimizer"]


@pytest.mark.parametrize("reading", ["on_forward", "on_output", "before_optimizer", "after_step"])
def test_a_reading_that_fails_takes_no_step_along(
    place: Here, reading: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = mlp()
    otel_ddp.instrument(model)
    stepper = watch._stepper
    assert stepper is not None
    tried = []

    def fails(*args: Any) -> None:
        tried.append(args)
        raise RuntimeError("no such reading")

    setattr(stepper, reading, fails)
    learn(model, INPUT, 20)
    otel_ddp.finish()

    assert len(tried) == 3
    assert caplog.text.count(f"{reading} failed") == 1
    (steps,) = (t.values[0] for t in place.only().all_totals if t.metric == "training.steps")
    assert steps == 20


@pytest.mark.parametrize("local_rank", [0, 1])
def test_what_is_not_measured_is_said_once_a_node(
    place: Here, local_rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    rank = str(local_rank)
    os.environ.update(OTEL_DDP_RANK=rank, OTEL_DDP_LOCAL_RANK=rank, OTEL_DDP_WORLD_SIZE="2")
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = mlp()
    otel_ddp.instrument(model)

    learn(model, INPUT, 10)
    otel_ddp.finish()

    lines = [record.message for record in caplog.records if record.name == "otel_ddp"]
    assert len(lines) == (1 if local_rank == 0 else 0)
    assert all("data (no DataLoader of torch's is used" in line for line in lines)
    assert place.only().facts["capability"]["data"] == "no_loader"


def test_an_optimizer_that_the_user_lets_go_of_is_not_held(place: Here) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_gradients_of_any_precision_have_a_norm(dtype: torch.dtype) -> None:
    gradient = torch.full((3, 3), 2.0, dtype=dtype)

    found = square_norm([gradient])

    assert found is not None
    assert float(found.value) == pytest.approx(36.0)
