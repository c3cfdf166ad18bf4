"""The table of a profile: whose operators take longer, whatever is in the traces."""

from __future__ import annotations

from typing import Any

import pytest

from otel_ddp.cli.profile.operators import OUTSIDE, compared, totals_of


def event(name: str, at: float, took: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": at, "dur": took}


def step(number: int, at: float, took: float = 1000.0) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", at, took, "user_annotation")


def milliseconds(trace: Any) -> dict[str, float]:
    return {name: pytest.approx(own_s * 1e3) for (name, _), own_s in totals_of(trace).own.items()}


def test_the_time_of_an_operator_is_without_what_it_calls_and_for_one_step() -> None:
    trace = {
        "traceEvents": [
            # What made the profiler ready is no step.
            *(event("aten::mm", -500, 400), step(7, 0), step(8, 1000)),
            *(event("aten::linear", 100, 400), event("aten::mm", 150, 300)),
            *(event("aten::copy_", 200, 100), event("aten::linear", 1100, 200)),
            event("kernel", 120, 50, "kernel", tid=7),
            event("gloo:all_reduce", 0, 600, "user_annotation", tid=2),
            # What is left open is cut by the one around it.
            *(event("outer", 1500, 100), event("inner", 1550, 100)),
        ]
    }

    found = totals_of(trace)

    assert found.step_s == pytest.approx(1e-3)
    assert milliseconds(trace) == {
        "aten::linear": (400 - 300 + 200) / 2e3,
        "aten::mm": (300 - 100) / 2e3,
        "aten::copy_": 100 / 2e3,
        "kernel": 50 / 2e3,
        "gloo:all_reduce": 600 / 2e3,
        "outer": 50 / 2e3,
        "inner": 50 / 2e3,
        OUTSIDE: (2000 - 400 - 200 - 100) / 2e3,
    }
    assert found.calls["aten::linear", False] == 1.0
    assert found.own["kernel", True] > 0


def test_rows_are_in_the_order_of_their_difference() -> None:
    late, healthy = (
        totals_of([step(1, 0), event("aten::mm", 0, mm), event("aten::add", 500, add)])
        for mm, add in ((400, 100), (100, 90))
    )

    rows = compared([late, healthy])

    assert [(row.name, round(row.difference_s * 1e6)) for row in rows] == [
        (OUTSIDE, -310),
        ("aten::mm", 300),
        ("aten::add", 10),
    ]
    assert [row.name for row in compared([late])] == [OUTSIDE, "aten::mm", "aten::add"]


@pytest.mark.parametrize(
    "trace",
    [
        *(None, 3, [], {}, {"traceEvents": 3}, {"traceEvents": [None, 3, {}, {"ph": "X"}]}),
        {"traceEvents": [{**event("a", 0, 1), "ts": "soon"}, {**event("a", 0, 1), "name": 3}]},
    ],
)
def test_a_trace_without_events_has_no_rows(trace: Any) -> None:
    assert compared([totals_of(trace)]) == []
