"""Loops that hooks could misread: each is measured as what it is, or not at all."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD

import otel_ddp
from conftest import Here, Journal
from loops import INPUT, PAUSE_S, Slow, phase, totals, train, watched
from otel_ddp.journal.place import Place

pytestmark = pytest.mark.timed


def test_a_program_that_another_one_replaces_has_counted_all_its_samples(
    run: otel_ddp.Run, place: Place
) -> None:
    train(*watched(), steps=75)

    with pytest.raises(FileNotFoundError):
        os.execv("/missing", ["missing"])

    assert totals(place, tell=False)["training.samples"] == 600


def test_a_checkpoint_that_fills_the_state_of_an_optimizer_makes_no_step(
    run: otel_ddp.Run, place: Place
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    # Plain SGD has no state, ever: it is given gradients at each checkpoint.
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        get_optimizer_state_dict(model, optimizer)
        train(model, optimizer, 2)
        optimizer.zero_grad()

    assert totals(place)["training.steps"] == 6


def test_a_phase_beside_training_takes_none_of_its_time(run: otel_ddp.Run, place: Here) -> None:
    model, optimizer = watched(Slow())
    train(model, optimizer, 1)
    begun, trained = threading.Event(), threading.Event()

    def save() -> None:
        with run.phase("checkpoint"):
            begun.set()
            trained.wait()

    saving = threading.Thread(target=save)
    saving.start()
    begun.wait()
    train(model, optimizer)
    before = place.only().progress.phase_after_ns
    trained.set()
    saving.join()

    found = totals(place)
    # Nor is its end a sign that training moves.
    assert place.only().progress.phase_after_ns == before
    assert phase(place, "checkpoint") == 0.0
    assert phase(place, "forward") >= 4 * PAUSE_S
    assert found["training.checkpoint.duration"] >= 9 * PAUSE_S
    assert "checkpoint" in place.only().spans


def test_what_is_left_open_in_one_step_is_closed_with_it(run: otel_ddp.Run, place: Place) -> None:
    """By Ctrl-C in the middle of a hook, say; phases of the user's go on."""
    model, optimizer = watched()
    progress = run._records.progress
    assert progress is not None
    with run.phase("epoch"):
        for name in ("data", "forward", "optimizer"):
            progress.phases.enter(progress.phases.of_hooks(name))
            train(model, optimizer, 1)
            assert Journal(place.journals()[0]).phase == "epoch"
        assert [each.name for each in progress.phases.opened] == ["other", "epoch"]
    assert totals(place)["training.steps"] == 3


def test_what_a_closure_does_beside_the_optimizer_is_not_the_optimizers(
    run: otel_ddp.Run, place: Place
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    seen: list[str] = []

    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            seen.append(phase())
            closure()
            seen.append(phase())
            return super().step()

    def phase() -> str:
        return Journal(place.journals()[0]).phase

    def closure() -> None:
        seen.append(phase())
        optimizer.zero_grad()
        output = model(INPUT)
        seen.append(phase())
        output.sum().backward()

    optimizer = Twice(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step(closure)
        seen.append(phase())

    # Before its forward, after it, and after backward; twice, and after the step.
    assert seen == ["other", "other", "optimizer", "optimizer", "other", "optimizer", "other"] * 2
    assert totals(place)["training.steps"] == 2


@pytest.mark.parametrize(("same", "given"), [(False, False), (True, False), (True, True)])
def test_each_time_a_model_is_given_it_may_have_an_optimizer_of_its_own(
    run: otel_ddp.Run, place: Place, same: bool, given: bool
) -> None:
    kept = []
    model = nn.Linear(4, 1)
    for _ in range(3):
        model = model if same else nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        otel_ddp.instrument(model, optimizer=optimizer if given else None)
        kept.append((model, optimizer))  # a fold's best state is still needed
        train(model, optimizer)

    assert totals(place)["training.steps"] == 9


@pytest.mark.parametrize(
    "step", [lambda optimizer, each: optimizer.step(each), lambda o, each: o.step(closure=each)]
)
def test_gradients_that_a_closure_brings_are_those_of_its_step(place: Here, step: Any) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model, optimizer = watched()

    def closure(factor: float) -> torch.Tensor:
        loss = factor * model(INPUT).sum()
        optimizer.zero_grad()  # of the step before, as lightning does it
        loss.backward()
        return loss

    for number in (1, 2, 3):
        step(optimizer, partial(closure, float(number)))
    otel_ddp.finish()

    assert place.only().curves["grad_norm"] == pytest.approx({2: 16 * 5**0.5, 3: 24 * 5**0.5})
