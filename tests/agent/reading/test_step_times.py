"""How fast a rank goes: its pace, the share of its waits, and the time per step by phase."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from make import MS, step_facts
from otel_ddp.agent.reading.exports import StepTimes
from otel_ddp.agent.reading.pace import Pace
from otel_ddp.diagnosis.detector import Observation
from otel_ddp.journal.parser import Total
from otel_ddp.vocabulary import catalog

S = 10**9


def totals(
    steps: float, host: Mapping[str, float], device: Mapping[str, float] | None = None
) -> list[Total]:
    """A process's totals: the seconds that it has spent by phase, on either clock."""
    found = [Total(catalog.TRAINING_STEPS.name, {}, (steps,), None)]
    for clock, seconds in (("host", host), ("device", device or {})):
        for phase, spent in seconds.items():
            attributes = {"phase": phase, "clock": clock}
            found.append(Total(catalog.TRAINING_PHASE_TIME.name, attributes, (spent,), None))
    return found


Spent = Mapping[str, float]


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        # From the first steps on.
        (({"forward": 0.0}, {"forward": 2.0}), ({}, {}), {"forward": 0.2}),
        # The device's clock counts where it is known, and is not added to the host's.
        (
            ({"forward": 0.0, "data": 0.0}, {"forward": 1.0, "data": 4.0}),
            *(({"forward": 0.0}, {"forward": 5.0}), {"forward": 0.5}),
        ),
        # One that has stopped is no clock.
        (
            ({"forward": 1.0}, {"forward": 2.0}),
            *(({"forward": 5.0}, {"forward": 5.0}), {"forward": 0.1}),
        ),
        # A phase of every step is told at 0, and any other only while it takes time.
        (
            (
                {"data": 0.0, "checkpoint": 5.0, "eval": 0.0},
                {"data": 0.0, "checkpoint": 5.0, "eval": 1.0},
            ),
            *(({}, {}), {"data": 0.0, "eval": 0.1}),
        ),
    ],
)
def test_the_time_per_step_is_that_of_the_clock_that_counts(
    host: tuple[Spent, Spent], device: tuple[Spent, Spent], expected: Spent
) -> None:
    times = StepTimes()

    assert times.feed(totals(0, host[0], device[0]), 0) == {}
    assert times.feed(totals(10, host[1], device[1]), 5 * S) == expected


def test_two_minutes_later_the_first_steps_count_no_more() -> None:
    times = StepTimes()
    times.feed(totals(0, {"forward": 0.0}), 0)
    slow = {
        now: times.feed(totals(now, {"forward": 3.0 * now}), now * S) for now in range(5, 65, 5)
    }
    fast = {
        now: times.feed(totals(now, {"forward": 180.0 + (now - 60)}), now * S)
        for now in range(65, 250, 5)
    }

    assert slow[60] == {"forward": 3.0}
    assert fast[120] == {"forward": pytest.approx(2.0)}
    assert fast[245] == {"forward": 1.0}


def seen(steps: int, took_ms: float, work_ms: float, **more: Any) -> Observation:
    """So many steps of this length and own work."""
    facts = [step_facts(1, 0, {"forward": work_ms}, took_ms, **more) for _ in range(steps)]
    ended: Any = SimpleNamespace(number=1, began_ns=0, ended_ns=round(took_ms * MS))
    return Observation(steps=[ended] * steps, facts=facts)


def test_a_pace_is_that_of_the_last_seconds_with_the_waits_of_usual_measured_steps() -> None:
    pace = Pace()
    nothing = pace.step_s, pace.wait_ratio
    pace.feed(seen(50, 100, 40))
    slow = pace.step_s, pace.wait_ratio
    # Two windows later the slow steps are too long ago.
    for _ in range(3):
        pace.feed(seen(100, 50, 50))
    fast = pace.step_s, pace.wait_ratio
    pace.feed(seen(1, 1000, 100, unusual=True))
    saved = pace.wait_ratio
    pace.feed(seen(1, 1000, 100, measured=False))
    bare = pace.wait_ratio

    assert nothing == (None, None)
    assert slow == (0.1, 0.6)
    assert fast == (0.05, 0.0)
    assert saved == bare == 0.0
