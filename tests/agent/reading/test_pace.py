"""How fast a rank goes, and how much of its time it waits, by what the judge is fed with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from make import MS, step_facts
from otel_ddp.agent.reading.pace import Pace
from otel_ddp.diagnosis.detector import Observation


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


def test_a_rank_whose_waits_are_not_known_has_a_pace() -> None:
    pace = Pace()

    pace.feed(seen(10, 20, 20)._replace(facts=[]))

    assert (pace.step_s, pace.wait_ratio) == (0.02, None)
