"""The totals of the steps only grow: a counter that falls looks as if its process had restarted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from otel_ddp.recording.step_totals import StepTotals


def test_a_thread_that_counted_before_the_last_step_takes_nothing_away() -> None:
    written = memoryview(bytearray(8 * 8)).cast("d")
    places = iter(range(8))
    recorder: Any = SimpleNamespace(
        writer=SimpleNamespace(totals=written), place=lambda *_, **__: next(places)
    )
    totals = StepTotals(recorder)
    for _ in range(2):
        totals.step_ended(0)

    totals.count((20, 40, 2), 8.0, "counted")
    totals.count((10, 20, 1), 8.0, "counted")

    assert written[:5].tolist() == [2.0, 20.0, 40.0, 2.0, 8.0]
