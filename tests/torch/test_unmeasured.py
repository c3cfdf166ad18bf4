"""Steps whose phases are not measured: their hooks are off, and all the rest is as it was."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer

from conftest import Journal
from make import phases_of, seconds_in
from measured import Measured, OneOf, Slow
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal import layout
from otel_ddp.torch import measure
from otel_ddp.torch.device_clock import DeviceClock
from otel_ddp.torch.steps.budget import in_sample
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.vocabulary.words import PHASES

EVERY, STEPS = 4, 200
# The first ones are measured in any case.
FIRST = 64
BATCH = torch.ones(8, 4)
UNMEASURED = PHASES["unmeasured"]


class Training(Measured):
    """A model that takes a second in forward and two in backward; the optimizer takes none."""

    def __init__(self, place: Path, every: int = EVERY) -> None:
        super().__init__(place)
        torch.manual_seed(0)
        self.every = every
        self.train(Slow(self))

    def train(self, model: nn.Module) -> None:
        """This model from now on, and one optimizer."""
        self.model, self.optimizer = model, SGD(model.parameters(), lr=0.01)
        self.begin(model)

    def begin(self, model: nn.Module | None, **options: Any) -> None:
        measure.start(model, self.progress, lambda _: None, every=0, **options)
        if self.every > 1:
            self.stepper.cost.budget = OneOf(self.every)

    @property
    def stepper(self) -> Stepper:
        assert measure._current is not None
        return measure._current.stepper

    @property
    def count(self) -> int:
        self.progress.settle()
        return self.progress.steps.count

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.model(BATCH).sum().backward()
            self.optimizer.step()

    def until_unmeasured(self) -> None:
        self.step(FIRST)
        while self.stepper.measured:
            self.step()

    def steps(self) -> list[Step]:
        self.progress.flush()
        return Journal(self.recorder.writer.path).steps

    def values(self) -> list[tuple[int | None, float]]:
        """The first value of each call, and its step."""
        return [(each.step, each.values[0]) for each in Journal(self.recorder.writer.path).calls]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path)
    yield found
    found.close()


def test_all_steps_are_counted_and_timed_and_one_in_k_is_measured(training: Training) -> None:
    training.step(STEPS)

    found = training.steps()
    assert [each.number for each in found] == [*range(1, STEPS + 1)]
    assert {each.took_ns for each in found} == {3 * 10**9}
    measured = [each.number for each in found if UNMEASURED not in phases_of(each)]
    assert measured == [n for n in range(1, STEPS + 1) if n <= FIRST or in_sample(n, EVERY)]
    assert all(
        each.parts.codes == bytes([UNMEASURED]) for each in found if each.number not in measured
    )
    assert {each.work for each in found} == {len(BATCH)}


def test_totals_are_those_of_a_training_that_is_measured_throughout(tmp_path: Path) -> None:
    totals = []
    for every in (1, EVERY):
        place = tmp_path / str(every)
        place.mkdir()
        with closing(Training(place, every)) as training:
            training.step(STEPS)
            found = training.totals()
            assert found.pop("otel_ddp.hook.time") > 0
            totals.append(found)

    # Of phases the shares are estimated.
    assert totals[1] == pytest.approx(totals[0], rel=0.02)
    assert sum(totals[1][name] for name in ("forward", "backward")) == pytest.approx(3 * STEPS)


def ours() -> int:
    return sum(
        "otel_ddp" in each.__module__
        for each in torch_optimizer._global_optimizer_pre_hooks.values()
    )


def hooks(module: Any) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def test_between_measured_steps_there_is_no_hook_but_the_one_after_the_optimizer(
    training: Training,
) -> None:
    training.step()
    assert (hooks(training.model), ours()) == (2, 1)

    training.until_unmeasured()
    assert (hooks(training.model), ours()) == (0, 0)

    while not training.stepper.measured:
        training.step()
    assert (hooks(training.model), ours()) == (2, 1)


def test_what_is_inside_of_a_ddp_has_no_hook_either(training: Training, alone: None) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(inner)
    training.train(ddp)
    training.until_unmeasured()
    assert (hooks(ddp), hooks(inner)) == (0, 0)
    inner.eval()
    assert (hooks(ddp), hooks(inner)) == (2, 2)
    with torch.no_grad():
        inner(BATCH)
    inner.train()
    training.step(51)
    assert [each.number for each in training.steps()][-1] == training.count


def test_a_model_that_is_copied_meanwhile_is_a_model_of_its_own(training: Training) -> None:
    training.train(nn.Linear(4, 1))
    training.until_unmeasured()
    copies = [copy.deepcopy(training.model) for _ in range(2)]
    training.step(8)

    before = training.progress.work.samples
    for each in copies:
        each(BATCH).sum().backward()
    assert training.progress.work.samples == before
    assert [hooks(each) for each in copies] == [0, 0]


def log_around(training: Training, number: int, *, step: int | None) -> None:
    """A step that logs in its middle and after its end; *step*: so far ahead of the loop."""
    named = None if step is None else step + number
    loss = training.model(BATCH).sum()
    training.recorder.log({"loss": float(number)}, step=named)
    loss.backward()
    training.optimizer.step()
    training.recorder.log({"lr": float(number)}, step=named)


def log_after(training: Training, number: int) -> None:
    training.step()
    training.recorder.log({"lr": float(number)})


def log_while_accumulating(training: Training, number: int) -> None:
    for part in range(4):
        training.model(BATCH).sum().backward()
        training.recorder.log({"loss": float(4 * number + part)})
    training.optimizer.step()
    training.optimizer.zero_grad()


@pytest.mark.parametrize(
    "log",
    [
        *(log_after, log_while_accumulating),
        *(partial(log_around, step=step) for step in (None, 10)),
    ],
)
def test_values_have_the_steps_that_they_have_where_all_are_measured(
    tmp_path: Path, log: Callable[[Training, int], None]
) -> None:
    found = []
    for every in (1, EVERY):
        place = tmp_path / str(every)
        place.mkdir()
        with closing(Training(place, every)) as training:
            for number in range(120):
                log(training, number)
            found.append((training.values(), [each.logged for each in training.steps()]))

    assert found[0] == found[1]


def test_an_evaluation_is_measured_in_any_step(training: Training) -> None:
    training.until_unmeasured()

    training.model.eval()
    with torch.no_grad():
        training.model(BATCH)
    training.model.train()
    training.step()

    last = training.steps()[-1]
    assert seconds_in(last, PHASES["eval"]) == 1
    assert seconds_in(last, PHASES["backward"]) == 2


def test_a_phase_of_the_users_is_measured_in_any_step(training: Training) -> None:
    training.until_unmeasured()

    phase = training.progress.begin("checkpoint")
    training.spend(7)
    training.progress.end(phase, 7.0)
    training.step()

    last = training.steps()[-1]
    assert (seconds_in(last, PHASES["checkpoint"]), last.took_ns) == (7, 10 * 10**9)
    assert seconds_in(last, UNMEASURED) == 3


def test_no_step_is_lost_where_optimizers_that_stay_take_turns(training: Training) -> None:
    training.until_unmeasured()
    before = training.count
    optimizers = [training.optimizer, SGD(training.model.parameters(), lr=0.01)]

    for number in range(1, 6):
        training.optimizer = optimizers[number % 2]
        training.step(40)

    assert training.count == before + 200
    assert training.steps()[-1].number == training.totals()["training.steps"] == before + 200
    assert training.progress.work.samples == len(BATCH) * (before + 200)


def test_an_optimizer_that_takes_the_place_of_another_ends_steps(training: Training) -> None:
    training.until_unmeasured()
    before = training.count

    for _ in range(3):
        training.optimizer = SGD(training.model.parameters(), lr=0.01)
        training.step(20)

    assert training.count == before + 60


def test_a_hook_of_the_users_may_come_after_ours(training: Training) -> None:
    called = []
    hook = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        training.step(STEPS)
    finally:
        hook.remove()

    assert len(called) == STEPS


@pytest.mark.parametrize("way", ["compiled", "in place", "whole step", "optimizer"])
def test_nothing_is_compiled_again_when_hooks_come_and_go(tmp_path: Path, way: str) -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    with closing(Training(tmp_path)) as training:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model: Any = inner
        optimizer = SGD(inner.parameters(), lr=0.01)
        step = optimizer.step

        def train() -> None:
            optimizer.zero_grad()
            model(BATCH).sum().backward()
            step()

        if way == "compiled":
            model = torch.compile(inner, backend=backend, fullgraph=True)
        elif way == "in place":
            inner.compile(backend=backend, fullgraph=True)
        elif way == "optimizer":
            step = torch.compile(optimizer.step, backend=backend)
        else:
            loss_of = torch.compile(lambda x: inner(x).sum(), backend=backend, fullgraph=True)
            model = lambda batch: loss_of(batch)  # noqa: E731
        training.begin(inner if way == "whole step" else model)
        for _ in range(FIRST):
            train()
        assert compiled
        before = len(compiled)
        states = set()
        for _ in range(60):
            train()
            states.add(training.stepper.measured)

        assert len(compiled) == before
        assert states == {True, False}
        assert training.count == FIRST + 60
    torch._dynamo.reset()


def test_a_device_is_timed_in_measured_steps_alone(training: Training) -> None:
    training.until_unmeasured()
    training.progress.phases.device_clock = clock = Mock(spec=DeviceClock)
    while not training.stepper.measured:
        training.step()
    number = training.count
    training.step()
    training.progress.phases.device_clock = None

    found = [name for name, *_ in clock.mock_calls if name != "step_finished"]
    assert not training.stepper.measured
    assert found[found.index("resume") :] == ["resume", *["mark"] * 7, "pause"]
    resumed_in, word = clock.resume.call_args.args
    assert (resumed_in, word >> layout.CODE_SHIFT) == (number, PHASES["other"])


def test_a_process_says_how_many_steps_are_measured(training: Training) -> None:
    training.step(STEPS)

    assert Journal(training.recorder.writer.path).facts["measuring"]["one_of"] == EVERY


@pytest.fixture
def before() -> Any:
    """What stood in the place of our function: that of an interrupted end may be left."""
    return vars(nn.Module)["eval"]


def test_hooks_that_come_off_in_an_unmeasured_step_leave_nothing_behind(
    before: Any, training: Training
) -> None:
    assert vars(nn.Module)["eval"] is not before
    training.until_unmeasured()

    measure.stop(None)
    model = training.model
    threading.Thread(target=lambda: model(BATCH)).start()
    training.step(3)

    assert (hooks(model), ours()) == (0, 0)
    assert vars(nn.Module)["eval"] is before
