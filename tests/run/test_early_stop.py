"""When a run says that it is time to stop, and what it tells of that."""

from __future__ import annotations

import math
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from otel_ddp.vocabulary import catalog


def answers(run: otel_ddp.Run, values: list[float], name: str = "loss", **how: Any) -> list[bool]:
    return [run.early_stop(name, value, **how) for value in values]


@pytest.mark.parametrize(
    ("values", "how", "stops_at"),
    [
        ([3, 2, 1, 1, 1, 0], {"patience": 3}, None),
        ([3, 2, 2, 2, 2, 0], {"patience": 3}, 4),
        ([3, 4, 2, 4, 4], {"patience": 2}, 4),
        ([1, 2], {"patience": 1}, 1),
        # Better by too little is not better.
        ([3, 2.95, 2.92, 2.6], {"patience": 2, "min_delta": 0.1}, 2),
        ([3, 2.85, 2.7], {"patience": 1, "min_delta": 0.1}, None),
        # What is not finite is no better than anything.
        ([3, math.nan, -math.inf, 1], {"patience": 2}, 2),
        ([math.nan, math.nan], {"patience": 2}, 1),
        ([1, 2, 3], {"patience": 1, "direction": "max"}, None),
        ([3, 2], {"patience": 1, "direction": "max"}, 1),
        ([3, 3], {"patience": 0}, 1),
    ],
)
def test_it_stops_after_so_many_evaluations_without_a_better_value(
    values: list[float], how: dict[str, Any], stops_at: int | None, place: Here
) -> None:
    with otel_ddp.init() as run:
        found = answers(run, values, **{"direction": "min", **how})

    assert found == [stops_at is not None and at >= stops_at for at in range(len(values))]


def test_the_direction_is_that_of_best_or_of_the_name_or_down_with_a_warning(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init(best={"speed": "max", "aux_loss": "none"}) as run:
        for name in ("accuracy", "val/f1", "speed"):
            assert answers(run, [1, 2, 3], name, patience=1) == [False] * 3
        assert answers(run, [1, 2], "val/loss", patience=1) == [False, True]
        assert caplog.text == ""
        for name in ("aux_loss", "margin"):
            assert answers(run, [1, 2], name, patience=1) == [False, True]

    assert 'direction="max"' in caplog.text


def test_a_value_that_is_no_number_changes_no_answer_and_is_named_once(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init() as run:
        values: list[Any] = [1.0, None, 2.0, None, "low", 0.5]
        assert answers(run, values, "loss", patience=1) == [False, False, True, True, True, True]

    assert caplog.messages == [
        "early_stop leaves out an evaluation of 'loss': its value is no number."
    ]


@pytest.mark.parametrize("how", [{"patience": "three"}, {"patience": 1, "min_delta": None}])
def test_who_gives_a_limit_that_is_no_number_is_told_that_nothing_stops(
    how: dict[str, Any], place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init() as run:
        assert answers(run, [1.0, 2.0, 3.0], "loss", **how) == [False] * 3

    assert caplog.messages == [
        "early_stop never stops for 'loss': patience and min_delta must be numbers."
    ]


def test_it_is_told_of_once_with_its_step(place: Here) -> None:
    with otel_ddp.init() as run:
        for step, loss in enumerate([3.0, 1.0, 2.0, 2.0, 2.0]):
            run.log({"loss": loss}, step=10 * step)
            run.early_stop("loss", loss, patience=2)

    journal = place.only()
    event = journal.events[catalog.EARLY_STOP_EVENT]
    assert (event["step"], event["attributes"]) == (
        30,
        {"monitor": "loss", "patience": 2, "best": 1.0},
    )
    assert journal.total(catalog.TRAINING_EARLY_STOP_STEP, monitor="loss") == 30


@pytest.mark.parametrize("why", ["disabled", "closed", "never opened"])
def test_the_answer_is_the_same_where_nothing_is_recorded(
    why: str, monkeypatch: pytest.MonkeyPatch, place: Here
) -> None:
    if why == "disabled":
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    run = otel_ddp.init()
    if why != "disabled":
        run.finish()

    assert answers(run, [2, 1, 1, 1], patience=2) == [False, False, False, True]
