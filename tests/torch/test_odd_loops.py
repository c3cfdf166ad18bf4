"""Loops that hooks could misread: each is measured as what it is, or not at all."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import otel_ddp
from conftest import Here, Journal
from loops import INPUT, PAUSE_S, Slow, idle_after, in_a_thread, phase, totals, train, watched
from measured import Measured
from measured import Slow as SlowByClock
from node import Node, finished
from otel_ddp.journal.place import Place
from otel_ddp.vocabulary import catalog

pytestmark = pytest.mark.timed


REPLACED = """
import os, sys
import torch
import otel_ddp
otel_ddp.init(run=f"part-{sys.argv[1]}")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
otel_ddp.instrument(model)
for _ in range(75):
    model(torch.ones(8, 4)).mean().backward()
    optimizer.step()
if sys.argv[1] == "1":
    os.execl(sys.executable, sys.executable, __file__, "2")
"""


def test_a_program_that_another_one_replaces_has_counted_all_its_samples(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPLACED)
    with Node(OTEL_DDP_AGENT="off") as node:
        finished(node.start(sys.executable, str(tmp_path / "train.py"), "1"))
        found = Here(node.place.directory).read()

    assert [each.total(catalog.TRAINING_SAMPLES) for each in found] == [600, 600]


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


class Late(TensorDataset):
    """Takes PAUSE_S for each item."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(PAUSE_S)
        return super().__getitem__(index)


def test_a_backward_that_raised_in_an_idle_thread_hides_no_other_threads_training(
    run: otel_ddp.Run, place: Place
) -> None:
    model, optimizer = watched()

    def trial() -> None:
        train(model, optimizer, 1)
        output = model(INPUT)
        output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()

    with idle_after(trial):
        train(model, optimizer, 3)
        in_a_thread(lambda: train(model, optimizer, 3))
    # What comes next may be a step, or a wait for data.
    with idle_after(trial):
        optimizer.step()
    with idle_after(trial):
        for _ in DataLoader(Late(INPUT[:4])):
            train(model, optimizer, 1)

    found = totals(place)
    assert found["training.steps"] == 1 + 6 + 1 + 1 + 1 + 4
    assert found["training.micro_batches"] == 1 + 6 + 1 + 1 + 4
    assert phase(place, "data") >= 3 * PAUSE_S


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


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_after_a_backward_is_a_part_of_its_step(tmp_path: Path, by_name: bool) -> None:
    with closing(Measured(tmp_path)) as measured:
        model = SlowByClock(measured)
        optimizer = SGD(model.parameters(), lr=0.01)
        measured.instrument(model)

        def closure() -> torch.Tensor:
            loss = model(INPUT).mean()
            loss.backward()
            return loss

        for number in range(9):
            closure()
            if number < 6:
                optimizer.step()
            elif by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)

        found = measured.totals()

    assert (found["training.steps"], found["training.micro_batches"]) == (9, 12)
    assert (found["forward"], found["backward"]) == (12, 24)
