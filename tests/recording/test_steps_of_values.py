"""Which step and epoch a value belongs to that is logged without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import otel_ddp
from conftest import Here

torch = pytest.importorskip("torch")


def steps(place: Here) -> list[int | None]:
    return [call.step for call in place.only().calls]


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5)])
def test_without_hooks_each_call_is_a_step(place: Here, value: Any) -> None:
    with otel_ddp.init() as run:
        for _ in range(4):
            run.log({"loss": value})

    assert steps(place) == [0, 1, 2, 3]
    assert place.only().progress.step == 3


def test_the_count_goes_on_from_the_largest_step_logged(place: Here) -> None:
    run = otel_ddp.init()

    run.log({"loss": 0.5})
    run.log({"loss": 0.5}, step=1000)
    for _ in range(2):
        run.log({"loss": 0.5})

    assert steps(place) == [0, 1000, 1001, 1002]


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5)])
def test_a_value_of_another_split_has_the_last_step_of_training(place: Here, value: Any) -> None:
    run = otel_ddp.init()

    for _ in range(2):
        for _ in range(3):
            run.log({"loss": value})
        run.log({"loss": value}, split="val")
        run.log({"test/acc": value})
    # What is logged of both at once is of training.
    run.log({"train_loss": value, "val_loss": value})

    assert steps(place) == [0, 1, 2, 2, 2, 3, 4, 5, 5, 5, 6]


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5)])
def test_an_evaluation_alone_counts_its_own_values(place: Here, value: Any) -> None:
    run = otel_ddp.init(job_type="eval")

    for _ in range(3):
        run.log({"val_loss": value})

    assert steps(place) == [0, 1, 2]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_call_without_a_recorded_value_is_no_step(place: Here, split: str) -> None:
    run = otel_ddp.init()

    run.log({}, split=split)
    run.log({"loss": 0.5}, split=split)
    run.log("loss", split=split)  # type: ignore[arg-type]
    run.log({"loss": 0.5}, split=split)

    assert [call.step for call in place.only().calls if call.values] == [0, 1]


@pytest.mark.parametrize(
    ("name", "epoch"), [("epoch", 3), ("Epoch", np.int64(3)), ("train/epoch", torch.tensor(3))]
)
def test_an_epoch_logged_as_a_value_is_the_epoch(place: Here, name: str, epoch: Any) -> None:
    run = otel_ddp.init()

    for _ in range(2):
        run.log({"loss": 0.5, name: epoch})
    run.log({"loss": 0.5, name: epoch}, epoch=7)
    run.log({"loss": 0.5})
    run.log({"loss": 0.5, name: float("inf")})

    assert [call.epoch for call in place.only().calls] == [3.0, 3.0, 7.0, None, None]


def test_an_event_happens_at_the_last_step(place: Here) -> None:
    run = otel_ddp.init()

    run.event("before")
    for _ in range(2):
        run.log({"loss": 0.5})
    run.event("after")

    assert [each["step"] for each in place.only().events.values()] == [None, 1]
