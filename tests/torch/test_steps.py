"""What a step is made of, for the ways in which people train, on one rank."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import otel_ddp
from conftest import Here
from loops import INPUT, PAUSE_S, Slow, in_a_thread, phase, totals, train, watched
from otel_ddp import errors
from otel_ddp.torch import models

pytestmark = pytest.mark.timed


def test_each_step_is_counted_as_it_ends(run: otel_ddp.Run, place: Here) -> None:
    model, optimizer = watched()
    # Within much less than the quarter of a second after which the course of the steps is written.
    train(model, optimizer, steps=6)

    # A process that hangs or is killed here says no more than this.
    found = totals(place, tell=False)

    assert found["training.steps"] == 6


def test_a_forked_child_that_trains_writes_nothing_into_its_parents_journal(
    run: otel_ddp.Run, place: Here
) -> None:
    model, optimizer = watched()
    train(model, optimizer, 2)
    before = totals(place)

    child = os.fork()
    if child == 0:
        with torch.no_grad():
            model(INPUT)
        for _ in otel_ddp.data([INPUT]):
            optimizer.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    assert totals(place, tell=False) == before
    train(model, optimizer, 1)
    assert totals(place)["training.steps"] == 3


def test_uninstrument_leaves_no_hook_behind(run: otel_ddp.Run, place: Here) -> None:
    from torch.optim import optimizer as optimizers
    from torch.utils.data import dataloader

    before = (dict(optimizers._global_optimizer_pre_hooks), list(gc.callbacks))
    original = dataloader._BaseDataLoaderIter.__next__
    model, optimizer = watched()
    assert model._forward_hooks

    otel_ddp.uninstrument()

    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert before == (dict(optimizers._global_optimizer_pre_hooks), list(gc.callbacks))
    assert dataloader._BaseDataLoaderIter.__next__ is original
    train(model, optimizer)
    assert "training.steps" not in totals(place)


def test_a_hook_that_keeps_failing_switches_itself_off(
    run: otel_ddp.Run,
    place: Here,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from otel_ddp.torch.steps import watched_model

    def broken(*args: Any) -> Any:
        raise LookupError("ours")

    monkeypatch.setattr(errors, "raise_failures", False)
    model, optimizer = watched()
    monkeypatch.setattr(watched_model, "workload", broken)

    train(model, optimizer, 10)

    assert caplog.text.count("measure no more steps") == 1
    assert totals(place)["otel_ddp.hook.errors"] == 3


def test_the_users_step_numbers_are_the_ones_shown(run: otel_ddp.Run, place: Here) -> None:
    model, optimizer = watched()

    train(model, optimizer, 2)
    counted = place.only().progress.step
    run.log({"loss": 1.0}, step=1000)
    train(model, optimizer, 3)
    after = place.only().progress.step
    model(INPUT).sum().backward()
    run.log({"loss": 1.0}, step=2000)
    optimizer.step()

    assert counted == 2
    # Logged between two steps it is the number of the one before, logged within one it is its own.
    assert after == 1003
    assert place.only().progress.step == 2000


@pytest.mark.parametrize(
    ("before", "during", "told"),
    [
        # The first step ended before there was a number.
        ([], [1, 2, 3], [None, 2, 3]),
        ([0], [None, None, None], [None, None, None]),
        ([0], [1, 2, 3], [None, 2, 3]),
    ],
)
def test_a_number_that_the_user_logs_of_a_step_is_told_also_where_it_is_ours(
    run: otel_ddp.Run,
    place: Here,
    before: list[int],
    during: list[int | None],
    told: list[int | None],
) -> None:
    model, optimizer = watched()
    for number in before:
        run.log({"parameters": 1.0}, step=number)
    for logged in during:
        train(model, optimizer, 1)
        run.log({"loss": 1.0}, step=logged)
    run.finish()

    found = place.only().steps
    assert [(each.number, each.logged) for each in found] == [*zip((1, 2, 3), told, strict=True)]


@pytest.mark.parametrize(
    ("logged", "shown"),
    [
        # What is evaluated may be logged by epoch.
        (["loss 100", "acc 3 val", "acc 4 val", "acc 5 val"], [1, 101, 102, 103, 104]),
        # So may values of no evaluation, as long as training is logged in between.
        (["loss 100", "acc 3", "f1 3", "loss 103", "acc 4"], [1, 101, 102, 103, 104, 105]),
    ],
)
def test_a_lower_number_does_not_change_that_of_the_step(
    run: otel_ddp.Run, place: Here, logged: list[str], shown: list[int]
) -> None:
    model, optimizer = watched()
    seen = []
    for call in (*logged, ""):
        train(model, optimizer, 1)
        seen.append(place.only().progress.step)
        if call:
            name, step, split = [*call.split(), None][:3]
            run.log({name: 0.5}, step=int(step or 0), split=split)

    assert seen == shown


def test_of_several_outputs_of_one_operation_any_leads_to_backward(
    run: otel_ddp.Run, place: Here
) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor) -> Any:
            # Backward starts at the third gradient of one node.
            return self.inner(inputs).unbind(1)[2]

    model = Parts()
    otel_ddp.instrument(model)
    for _ in range(3):
        output = model(INPUT)
        assert not output._backward_hooks
        output.sum().backward()

    assert totals(place)["training.micro_batches"] == 3
    assert phase(place, "backward") > 0


def test_an_evaluation_without_steps_is_recorded_in_time(
    run: otel_ddp.Run, place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otel_ddp.recording import progress

    monkeypatch.setattr(progress, "_MOST_WORDS", 50)
    model = nn.Linear(4, 1).eval()
    otel_ddp.instrument(model)
    for _ in range(200):
        model(INPUT)

    assert run._records is not None
    assert len(run._records.progress.phases.pending) <= 52
    assert totals(place, tell=False)["training.phase.time/eval/host"] > 0


def test_an_older_torch_gets_a_warning_and_no_hooks(
    run: otel_ddp.Run,
    place: Here,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu121")
    model = nn.Linear(4, 1)

    otel_ddp.instrument(model)
    otel_ddp.instrument(model)
    train(model, SGD(model.parameters(), lr=0.1))
    run.log({"loss": 1.0})

    (said,) = caplog.messages
    assert "torch 2.4 or newer" in said
    assert "2.3.1+cu121" in said
    assert not model._forward_hooks
    assert "training.steps" not in totals(place)
    assert place.only().points == [("loss", 1.0)]
    newer = "2.4.0a0+git1234", "10.1", "a build of mine"
    assert [models.too_old(each) for each in newer] == [""] * 3


@pytest.mark.parametrize("trains", [False, True], ids=["an actor", "a second trainer"])
def test_what_another_thread_does_amid_a_step_is_no_part_of_it(
    run: otel_ddp.Run, place: Here, trains: bool
) -> None:
    model, optimizer = watched(Slow())
    other, others = watched(Slow())
    train(model, optimizer, 1)
    main = threading.get_ident()

    @torch.no_grad()
    def evaluate() -> None:
        model(INPUT)

    def meanwhile(*_: Any) -> None:
        if threading.get_ident() == main:
            in_a_thread((lambda: train(other, others, 1)) if trains else evaluate)

    hook = model.inner.register_forward_hook(meanwhile)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(INPUT)
        output.register_hook(meanwhile)
        output.sum().backward()
        if not trains:
            meanwhile()
        optimizer.step()
    hook.remove()

    found = totals(place)
    assert found["training.steps"] == found["training.micro_batches"] == 4
    assert found["training.samples"] == 32
    assert "training.phase.time/eval/host" not in found
    # With what was done meanwhile inside: a forward, or a step.
    inside = 9 if trains else 3
    assert phase(place, "forward") >= (4 + inside) * PAUSE_S
    assert phase(place, "backward") >= (8 + inside) * PAUSE_S
