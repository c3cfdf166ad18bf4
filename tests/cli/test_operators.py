"""The table of a profile: whose operators take longer, whatever is in the traces."""

from __future__ import annotations

from typing import Any

import pytest

from otel_ddp.cli.node.profile.operators import IDLE, OUTSIDE, Totals, compared, culprit, totals_of


def event(name: str, at: float, took: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": at, "dur": took}


def step(number: int, at: float, took: float = 1000.0) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", at, took, "user_annotation")


def milliseconds(trace: Any, on_device: bool) -> dict[str, float]:
    own = totals_of(trace).own.items()
    return {name: pytest.approx(s * 1e3) for (name, device), s in own if device == on_device}


def test_the_time_of_an_operator_is_without_what_it_calls_and_for_one_step() -> None:
    trace = {
        "traceEvents": [
            # What made the profiler ready is no step.
            *(event("aten::mm", -500, 400), step(7, 0), step(8, 1000)),
            *(event("aten::linear", 100, 400), event("aten::mm", 150, 300)),
            *(event("aten::copy_", 200, 100), event("aten::linear", 1100, 200)),
            *(event("kernel", 120, 200, "kernel", tid=7), event("kernel", 1900, 300, "kernel", 7)),
            event("ncclDevKernel", 270, 100, "kernel", tid=8),
            event("gloo:all_reduce", 0, 600, "user_annotation", tid=2),
        ]
    }

    found = totals_of(trace)

    assert found.step_s == pytest.approx(1e-3)
    host = {
        "aten::linear": (400 - 300 + 200) / 2e3,
        "aten::mm": (300 - 100) / 2e3,
        "aten::copy_": 100 / 2e3,
        # Of another thread: only while the thread of the steps is in no operator.
        "gloo:all_reduce": (100 + 100) / 2e3,
        OUTSIDE: (2000 - 400 - 200 - 200) / 2e3,
    }
    # Of two streams, what the busier one leaves free; what reaches out of the steps is cut.
    device = {"kernel": 300 / 2e3, "ncclDevKernel": 50 / 2e3, IDLE: (2000 - 350) / 2e3}
    assert milliseconds(trace, on_device=False) == host
    assert milliseconds(trace, on_device=True) == device


def totals(**own_us: float) -> Totals:
    """A step of 1 ms with these operators one after the other."""
    events = [step(1, 0)]
    at = 0.0
    for name, took in own_us.items():
        if name == "kernel":
            events.append(event(name, 0, took, "kernel", tid=7))
            continue
        events.append(event(name.replace("_", "::", 1), at, took))
        at += took
    return totals_of({"traceEvents": events})


def test_rows_are_in_the_order_of_the_difference_to_the_other_rank() -> None:
    late, healthy = (totals(aten_mm=mm, aten_add=add) for mm, add in ((400, 100), (110, 90)))

    rows = compared([late, healthy])

    assert [(row.name, round(row.difference_s * 1e6)) for row in rows] == [
        (OUTSIDE, -300),
        ("aten::mm", 290),
        ("aten::add", 10),
    ]
    assert [row.name for row in compared([late])] == [OUTSIDE, "aten::mm", "aten::add"]


@pytest.mark.parametrize(
    ("late", "healthy", "sentence"),
    [
        (
            {"aten_convolution": 700, "aten_mm": 30},
            {"aten_convolution": 300, "aten_mm": 20, "gloo:all_reduce": 400},
            "Rank 3 needs 400 us longer a step in aten::convolution than rank 0: "
            "700 us against 300 us.",
        ),
        (
            {"aten_mm": 100},
            {"aten_mm": 100, "gloo:all_reduce": 500},
            f"Rank 3 needs 500 us longer a step {OUTSIDE} than rank 0: 900 us against 400 us.",
        ),
        (
            {"aten_mm": 300, "aten_add": 300, "aten_sum": 310, "gloo:all_reduce": 90},
            {"aten_mm": 200, "aten_add": 200, "aten_sum": 200, "gloo:all_reduce": 400},
            "No single operator explains it: rank 3 needs 310 us longer a step in 3 operators "
            "than rank 0, most of all in aten::sum: 310 us against 200 us.",
        ),
        (
            {"aten_mm": 300, "gloo:all_reduce": 700},
            {"aten_mm": 310, "gloo:all_reduce": 690},
            "No operator explains it: in these steps rank 3 needs no longer than rank 0.",
        ),
        (
            # The host waits for its device: the kernel is the reason.
            {"aten_item": 600, "kernel": 600},
            {"aten_item": 200, "kernel": 200},
            "Rank 3 needs 400 us longer a step in kernel on the device than rank 0: "
            "600 us against 200 us.",
        ),
    ],
)
def test_a_sentence_names_the_culprit(
    late: dict[str, float], healthy: dict[str, float], sentence: str
) -> None:
    ranks = totals(**late), totals(**healthy)

    assert culprit([3, 0], ranks[0].step_s, compared(ranks)) == sentence
