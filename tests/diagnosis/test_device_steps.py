"""Ranks that are compared by the clocks of their devices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import make
from otel_ddp.diagnosis.step_facts import DeviceSteps, StepFacts, facts_of
from otel_ddp.diagnosis.steps import Step
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.journal.layout import PACED_SHIFT
from otel_ddp.vocabulary.words import PHASES
from ranks import Job, Told

MS = 1_000_000
NOW = 1_700_000_000_000 * MS
# A step of 100 ms: what the device needs for each phase, and what the host needs to launch it.
ON_DEVICE = {"data": 0.1, "forward": 25.0, "backward": 50.0, "optimizer": 10.0}
ON_HOST = {"data": 1.0, "forward": 8.0, "backward": 12.0, "comm_wait": 0.1, "optimizer": 2.0}


def step_of(
    number: int, phases_ms: Mapping[str, float], paced_ms: Mapping[str, float] | None = None
) -> Step:
    """A step that took all of its 100 ms, or as long as its phases."""
    paced = tuple(
        PHASES[word] << PACED_SHIFT | round(ms * MS) for word, ms in (paced_ms or {}).items()
    )
    pieces = [(PHASES[word], round(ms * MS)) for word, ms in phases_ms.items()]
    lag_ns = None if paced_ms is None else 30 * MS
    return make.step_of(number, NOW + number * 100 * MS, pieces, paced=paced, lag_ns=lag_ns)


def facts(step: Step) -> list[StepFacts]:
    return facts_of([step])


def test_what_a_step_was_the_host_says_and_how_long_it_took_the_device() -> None:
    joined = DeviceSteps()
    host = facts(step_of(7, ON_HOST))[0]._replace(unusual=True, work=512, garbage_ns=9)
    joined.feed_host([host])

    (found,) = joined.feed([step_of(7, {**ON_DEVICE, "comm_wait": 15.0}, {"data": 0.1})])

    assert (found.number, found.work, found.unusual, found.garbage_ns) == (7, 512, True, 9)
    assert found.took_ns == pytest.approx(100.1 * MS)
    assert found.wait_ns == 15 * MS
    assert found.phases_ns == (100_000, 25 * MS, 50 * MS, 10 * MS, 0, 0)
    assert found.paced_ns == (100_000, 0, 0, 0, 0, 0)
    assert found.ended_ns == host.ended_ns + 30 * MS


def test_how_far_the_device_is_behind_when_a_step_begins_is_known_of_the_step_before() -> None:
    joined = DeviceSteps()
    for number in (7, 8, 10):
        joined.feed_host(facts(step_of(number, ON_HOST)))

    found = joined.feed([step_of(number, ON_DEVICE, {}) for number in (7, 8, 10)])

    assert [each.behind_ns for each in found] == [None, 30 * MS, None]


def test_a_step_that_the_device_never_finished_is_not_waited_for() -> None:
    joined = DeviceSteps()
    for number in range(1, 5000):
        joined.feed_host(facts(step_of(number, ON_HOST)))

    assert joined.feed([step_of(10, ON_DEVICE, {})]) == []
    assert len(joined.feed([step_of(4999, ON_DEVICE, {})])) == 1


def test_nothing_is_said_where_the_clock_of_a_device_is_not_known_any_more() -> None:
    job = Job(device_clock=True)
    assert [each.opened for each in job.steps(130, {2: {"backward": 0.03}})] == [True]

    job.told.know(1, device_clock=False)

    assert [each.opened for each in job.detector.poll(0)] == [False]
    job.steps(130, {2: {"backward": 0.03}})
    assert job.report().insufficient == (
        "insufficient data: the waits are on the device, whose clock is not known on rank 1"
    )


def test_ranks_of_which_no_step_was_timed_are_named() -> None:
    detector = Stragglers()
    for rank in (0, 1):
        Told(detector, device_clock=True).know(rank)

    assert detector.report().insufficient == (
        "insufficient data: the device's clock has not timed a step yet on rank 0, 1"
    )
