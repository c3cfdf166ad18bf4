"""`instrument()` without a model: the models that train are found when they are called."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import otel_ddp
from conftest import Here
from loops import phase, totals
from otel_ddp.torch import discovery

INPUT = torch.ones(8, 4)
STEPS = 14


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Nothing compiled before, and nothing of ours on torch afterwards."""
    torch._dynamo.reset()
    filters = list(warnings.filters)
    yield
    otel_ddp.finish()
    assert not _has_any_global_hook()
    assert warnings.filters == filters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).relu())


class Scale(nn.Module):
    """A loss that learns as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (self.weight * output).square().mean()


def sgd(*models: nn.Module) -> SGD:
    return SGD([p for model in models for p in model.parameters()], lr=0.01)


def train(
    call: Callable[..., torch.Tensor],
    optimizer: SGD,
    steps: int = STEPS,
    loss: Callable[..., torch.Tensor] = torch.sum,
) -> None:
    for _ in range(steps):
        loss(call(INPUT)).backward()
        optimizer.step()
        optimizer.zero_grad()


def hooks(*models: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return sum(len(getattr(m, kind)) for model in models for m in model.modules() for kind in kinds)


class TrainerOfItsOwn:
    """Builds its model, its loss and its optimizer where nobody sees them."""

    def run(self) -> None:
        model = Net()
        criterion = nn.MSELoss()
        train(model, sgd(model), loss=lambda output: criterion(output, torch.ones(8, 1)))


def test_a_trainer_that_builds_its_own_model_is_measured_from_its_first_step(place: Here) -> None:
    otel_ddp.instrument()

    TrainerOfItsOwn().run()

    found = totals(place)
    assert found["training.steps"] == found["training.micro_batches"] == STEPS
    assert found["training.samples"] == 8 * STEPS
    assert place.only().facts["model"] == "Net"


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        *(DataParallel, sharded, compiled),
        lambda net: compiled(DistributedDataParallel(net)),
        lambda net: nn.Sequential(DistributedDataParallel(net)),
    ],
)
def test_what_wraps_a_model_is_watched_as_one_and_nothing_of_torch_complains(
    place: Here, alone: None, wrap: Any
) -> None:
    model = wrap(Net())
    before = hooks(model)

    otel_ddp.instrument()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hook.*")
        train(model, sgd(model))

    found = totals(place)
    assert found["training.steps"] == found["training.micro_batches"] == STEPS
    assert found["training.samples"] == 8 * STEPS
    # On the object that is called, and on the module inside of DDP, which may be validated alone.
    assert hooks(model) == before + (4 if isinstance(model, DistributedDataParallel) else 2)


def test_one_batch_of_several_models_is_counted_once(place: Here) -> None:
    otel_ddp.instrument()
    encoder, decoder, criterion = Net(), nn.Linear(1, 1), Scale()

    train(lambda x: decoder(encoder(x)), sgd(encoder, decoder, criterion), loss=criterion)

    found = totals(place)
    assert found["training.steps"] == found["training.micro_batches"] == STEPS
    assert found["training.samples"] == 8 * STEPS
    # All of them are in forward.
    assert hooks(encoder) == hooks(decoder) == hooks(criterion) == 2
    assert place.only().facts["model"] == "Net"


def test_what_does_not_train_is_left_alone(place: Here) -> None:
    otel_ddp.instrument()
    teacher, student, frozen, criterion = Net().eval(), Net(), Net(), nn.MSELoss()
    momentum = Net()
    frozen.requires_grad_(False)
    optimizer = sgd(student)
    for _ in range(STEPS):
        with torch.no_grad():
            wanted = teacher(INPUT) + momentum(INPUT) + student.eval()(INPUT)
        student.train()
        criterion(frozen(INPUT) + student(INPUT), wanted).backward()
        optimizer.step()

    assert totals(place)["training.steps"] == STEPS
    assert hooks(student) == 2
    assert hooks(teacher, momentum, frozen, criterion) == 0


def test_a_gan_that_freezes_one_of_its_models_in_turn_counts_each_round_once(place: Here) -> None:
    """As Lightning's `toggle_optimizer` does: each is found where its own turn comes."""
    otel_ddp.instrument()
    critic, generator = nn.Linear(4, 1), nn.Linear(2, 4)
    of_critic, of_generator = sgd(critic), sgd(generator)
    noise = torch.ones(8, 2)
    for _ in range(STEPS):
        critic.requires_grad_(True)
        generator.requires_grad_(False)
        (critic(generator(noise)) - critic(INPUT)).sum().backward()
        of_critic.step()
        critic.requires_grad_(False)
        generator.requires_grad_(True)
        (-critic(generator(noise))).sum().backward()
        of_generator.step()

    assert hooks(critic) == hooks(generator) == 2
    assert totals(place)["training.steps"] == STEPS


@pytest.mark.parametrize(("made", "missed"), [("for each fold", 0), ("all at first", 1)])
def test_each_fold_is_measured_from_the_first_step_of_an_optimizer_of_its_own(
    place: Here, made: str, missed: int
) -> None:
    torchs_own = torch.optim.Optimizer.__init__
    otel_ddp.instrument()
    first, second = Net(), nn.Linear(4, 1)
    of_second = None if made == "for each fold" else sgd(second)
    train(first, sgd(first))
    assert not _has_any_global_hook()

    train(second, of_second or sgd(second))

    # Of an optimizer that was there before, the first step is how it is known to train another one.
    assert totals(place)["training.steps"] == 2 * STEPS - missed
    assert place.only().facts["model"] == "Linear"
    assert not _has_any_global_hook()
    otel_ddp.finish()
    assert torch.optim.Optimizer.__init__ is torchs_own


def in_place(model: nn.Module, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def whole(model: nn.Module, backend: Any) -> Any:
    @torch.compile(backend=backend, fullgraph=True)
    def call(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs)

    return call


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        (lambda model, backend: torch.compile(model, backend=backend), STEPS),
        # Found when it is compiled, and measured from its next call on.
        (in_place, STEPS - 1),
        # No module is called, and no step counted.
        (whole, 0),
    ],
)
def test_nothing_is_compiled_once_more_for_us(
    place: Here, caplog: pytest.LogCaptureFixture, how: Any, seen: int
) -> None:
    counter = CompileCounter()
    otel_ddp.instrument()
    model = Net()
    call = how(model, counter)

    train(call, sgd(model))

    assert counter.frame_count == 1
    found = totals(place)
    assert found.get("training.micro_batches", 0) == seen
    assert found.get("training.steps", 0) == (STEPS if seen else 0)
    assert ("name the model" in caplog.text) is (seen == 0)


def test_arguments_by_name_are_counted_in_the_first_call_too(place: Here) -> None:
    class Words(nn.Embedding):
        def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)

    otel_ddp.instrument()
    model = Words(16, 4)
    optimizer = sgd(model)
    for _ in range(3):
        model(input_ids=torch.ones(2, 5, dtype=torch.long)).sum().backward()
        optimizer.step()

    assert totals(place)["training.tokens"] == 30


def test_hooks_that_are_taken_off_during_the_search_leave_nothing(place: Here) -> None:
    otel_ddp.instrument()
    model = Net().eval()
    model(INPUT)
    otel_ddp.uninstrument()
    assert not _has_any_global_hook()
    assert hooks(model) == 0

    train(model.train(), sgd(model))

    assert "training.steps" not in totals(place)


def test_a_first_forward_that_raises_raises_what_it_raised(place: Here) -> None:
    class Fails(Net):
        fails = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.fails:
                # Torch comes to this one after ours.
                self.register_forward_hook(lambda *_: None, always_call=True)
                raise LookupError("the user's own")
            return super().forward(inputs)

    otel_ddp.instrument()
    model = Fails()
    for mode in (False, True):
        with pytest.raises(LookupError, match="the user's own"):
            model.train(mode)(INPUT)
    model.fails = False
    train(model, sgd(model))

    assert totals(place)["training.micro_batches"] == STEPS


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_a_part_of_the_model(
    place: Here, reentrant: bool
) -> None:
    class Checkpointed(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden: Any = checkpoint(self.first, inputs, use_reentrant=reentrant)
            return self.last(hidden)

    otel_ddp.instrument()
    model = Checkpointed()
    inputs = INPUT.clone().requires_grad_()
    train(lambda _: model(inputs), sgd(model))

    assert (hooks(model), hooks(model.first, model.last)) == (2, 0)
    assert totals(place)["training.samples"] == 8 * STEPS


def test_a_search_that_ended_without_a_step_begins_again_at_one(
    place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_CALLS", 50)
    otel_ddp.instrument()
    model = Net().eval()
    optimizer = sgd(model)
    with torch.no_grad():
        for _ in range(51):
            model.last(INPUT)
    assert not _has_any_global_hook()

    def closure() -> torch.Tensor:
        loss = model(INPUT).sum()
        loss.backward()
        return loss

    model.train()
    for _ in range(STEPS):
        optimizer.step(closure)

    assert totals(place)["training.steps"] == STEPS


class Marked(nn.Module):
    """Its loop calls a method, as that of a wrapper with a marked forward method does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Net()

    def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inside(inputs).square().mean()


def test_of_a_model_that_is_named_and_never_called_the_parts_that_are_called_are_measured(
    place: Here,
) -> None:
    model = Marked()
    otel_ddp.instrument(model)

    train(model.training_step, sgd(model))

    assert totals(place)["training.steps"] == STEPS
    # Before the first step has ended, the model may yet be called.
    assert totals(place)["training.samples"] == 8 * (STEPS - 1)
    assert phase(place, "forward") > 0
    assert phase(place, "backward") > 0
    assert hooks(model.inside.first, model.inside.last) == 0


def test_a_child_that_is_forked_during_the_search_does_not_search(place: Here) -> None:
    otel_ddp.instrument()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(1 if _has_any_global_hook() else 0)

    assert os.waitpid(pid, 0)[1] == 0
    assert _has_any_global_hook()


def test_batches_that_are_loaded_before_there_is_a_model_make_no_step(place: Here) -> None:
    otel_ddp.instrument()

    for _ in otel_ddp.data([INPUT] * 3):
        pass
    assert place.only().state == "starting"
    model = Net()
    optimizer = sgd(model)
    for batch in otel_ddp.data([INPUT] * 3):
        model(batch).sum().backward()
        optimizer.step()

    assert totals(place)["training.steps"] == 3
    assert phase(place, "data") > 0
