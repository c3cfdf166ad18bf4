"""Which step a value belongs to where hooks count the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import otel_ddp
from conftest import Here
from loops import INPUT, watched
from otel_ddp.journal.parser import Document


def test_a_value_has_the_step_that_it_was_logged_in_or_after(
    run: otel_ddp.Run, place: Here
) -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(INPUT), batch_size=len(INPUT) // 2)
    otel_ddp.instrument(model)

    for _ in range(3):
        run.log({"layers": 1})
    for _ in range(2):
        for (batch,) in loader:
            loss = model(batch).sum()
            run.log({"in forward": loss})
            loss.backward()
            run.log({"before": loss})
            optimizer.step()
            optimizer.zero_grad()
            run.log({"after": loss})
        # The loader was asked once more by now.
        run.log({"of the epoch": 1.0})
        with torch.no_grad():
            run.log({"val_loss": model(INPUT).sum()})
    run.event("done")

    seen = place.only()
    for name in ("in forward", "before", "after"):
        assert seen.steps_of(name) == [1, 2, 3, 4]
    assert seen.steps_of("of the epoch") == seen.steps_of("val_loss") == [2, 4]
    # Nothing had been trained yet.
    assert seen.steps_of("layers") == [0, 1, 2]
    assert place.only().events["done"]["step"] == 4


def test_spans_and_events_have_the_step_that_values_beside_them_have(
    run: otel_ddp.Run, place: Here
) -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(INPUT), batch_size=len(INPUT) // 2)
    otel_ddp.instrument(model)

    for (batch,) in loader:
        loss = model(batch).sum()
        with run.span("backward"):
            loss.backward()
        run.event("before")
        optimizer.step()
        with run.phase("checkpoint"):
            run.event("after")

    journal = place.only()
    spans = [each.content for each in journal.records if isinstance(each, Document)]
    found = {
        name: [each["step"] for each in spans if name == each.get("name")]
        for name in ("backward", "before", "checkpoint", "after")
    }
    assert found == {name: [1, 2] for name in found}
    # What is done after a step takes time of the next one, as the trace shows.
    assert journal.spans["checkpoint"]["trace"] == "step/3"
    assert journal.spans["backward"]["trace"] == "step/2"


def test_a_micro_batch_is_logged_at_the_step_that_it_is_part_of(
    run: otel_ddp.Run, place: Here
) -> None:
    model, optimizer = watched()

    for micro_batch in range(6):
        loss = model(INPUT).sum()
        loss.backward()
        run.log({"loss": loss})
        if micro_batch % 2:
            optimizer.step()

    assert place.only().steps_of("loss") == [1, 1, 2, 2, 3, 3]


class Inheriting(torch.amp.GradScaler):
    """A scaler whose own class has no `update`, as that of `torch.cuda.amp`."""


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Inheriting])
def test_a_value_after_a_step_that_the_scaler_left_out_has_the_step_it_was_logged_in(
    run: otel_ddp.Run, place: Here, kind: type[torch.amp.GradScaler]
) -> None:
    model, scaler = nn.Linear(4, 1), kind("cpu")
    optimizer = SGD(model.parameters(), lr=0.1)
    otel_ddp.instrument(model, scaler=scaler)

    for factor in (1.0, float("inf"), 1.0, 1.0):
        scaler.scale(model(INPUT).sum() * factor).backward()
        run.log({"before": 1.0})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert place.only().steps_of("before") == [1, 2, 3, 4]


def test_where_no_optimizer_steps_each_backward_is_a_step(run: otel_ddp.Run, place: Here) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)

    for _ in range(100):
        loss = model(INPUT).sum()
        loss.backward()
        run.log({"loss": loss})
    run.log({"val_loss": loss})

    seen = place.only()
    assert seen.steps_of("loss") == [*[1] * 64, *range(65, 101)]
    assert seen.steps_of("val_loss") == [100]


def resumed(model: nn.Module, state: dict[str, Any] | None) -> AdamW:
    optimizer = AdamW(model.parameters(), lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


def trained(run: otel_ddp.Run, model: nn.Module, optimizer: Optimizer, count: int) -> None:
    otel_ddp.instrument(model)
    for _ in range(count):
        optimizer.zero_grad()
        model(INPUT).sum().backward()
        optimizer.step()
        run.log({"loss": 0.5})


def test_a_resumed_run_goes_on_from_what_its_optimizer_has_counted(place: Here) -> None:
    model = nn.Linear(4, 1)
    state = None
    for _ in range(2):
        optimizer = resumed(model, state)
        with otel_ddp.init(run="resumed") as run:
            trained(run, model, optimizer, 3)
        state = optimizer.state_dict()

    first, second = sorted(place.read(), key=lambda each: each.calls[0].time_ns)
    assert first.steps_of("loss") == [1, 2, 3]
    assert second.steps_of("loss") == [4, 5, 6]
    assert second.progress.step == 6


def test_a_resumed_run_goes_on_from_the_step_that_the_user_names(
    run: otel_ddp.Run, place: Here
) -> None:
    model = nn.Linear(4, 1)
    optimizer = resumed(model, None)
    trained(run, model, optimizer, 2)
    run.log({"resumed": 1.0}, step=500)
    trained(run, model, optimizer, 2)

    assert place.only().steps_of("loss") == [1, 2, 501, 502]
