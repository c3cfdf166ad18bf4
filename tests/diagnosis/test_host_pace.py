"""What hosts need for their batches and launches, where that shows only now and then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from make import labels_of, step_facts
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler.host_pace import HostNeed, HostPace, LaunchNeed

MS = 1_000_000


def step(
    number: int, *, data_ms: float = 0, launch_ms: float = 40, keeps_up: bool = False
) -> StepFacts:
    """A step of 100 ms; its device *keeps_up* with the host in forward, or not at all."""
    forward_ns = round((launch_ms if keeps_up else 90) * MS)
    return step_facts(
        *(number, number * 100 * MS, {"forward": forward_ns / MS}, 100),
        wait_ns=0,
        paced_ns=(0, forward_ns if keeps_up else 0, 0, 0, 0),
        host_ns=(round(data_ms * MS), round(launch_ms * MS), 0, 0, 0),
    )


def host(waits_ms: Iterable[float]) -> HostNeed:
    """One that has waited for its batches like this."""
    need = HostNeed()
    for number, data_ms in enumerate(waits_ms):
        facts = step(number, data_ms=data_ms)
        need.begin([facts])
        need.follow(facts)
    return need


def test_batches_that_are_ready_may_take_as_long_as_those_of_the_rank_that_waits() -> None:
    waits = host([80] * 200)
    ready = host([70] * 8 + [0] * 192)

    assert ready.loads_ns(waits) == pytest.approx(80 * MS)


def test_batches_that_were_always_ready_are_loaded_in_time() -> None:
    waits = host([2] * 100 + [80] * 100)
    ready = host([2] * 200)

    assert ready.loads_ns(waits) == pytest.approx(2 * MS)


def test_first_batches_that_take_long_on_all_ranks_say_nothing_of_later_ones() -> None:
    waits = host([130] * 5 + [30] * 195)
    ready = host([100] * 5 + [0] * 195)

    assert ready.loads_ns(waits) == 0


def test_a_shorter_wait_than_before_is_a_lead() -> None:
    waits = host([80] * 200)
    ahead = host([80] * 150 + [65] * 50)

    assert ahead.loads_ns(waits) == pytest.approx(80 * MS, rel=0.01)


def test_batches_that_begin_to_take_long_are_known_after_ten_of_them() -> None:
    assert host([0] * 100 + [30] * 10).waits_ns == pytest.approx(30 * MS)
    assert host([0] * 100 + [30, 0] * 20).waits_ns < 0.001 * MS


def launching(*steps: StepFacts) -> float:
    """What is known after these steps, in milliseconds, where a step takes 100."""
    need = LaunchNeed()
    for each in steps:
        need.follow(each)
    return need.usual_ns(100 * MS) / MS


def test_a_host_shows_what_it_needs_to_launch_where_its_device_keeps_up() -> None:
    keeps_up = [step(i, launch_ms=95, keeps_up=True) for i in range(3)]
    queue_is_full = [step(i, launch_ms=88) for i in range(3, 500)]

    assert launching(*keeps_up, *queue_is_full) == 95
    assert launching(*keeps_up[1:], *queue_is_full) == 0


def test_what_a_host_needs_is_not_known_where_its_device_never_keeps_up() -> None:
    assert launching(*[step(i, launch_ms=88) for i in range(500)]) == 0


def test_what_a_host_has_shown_is_forgotten_in_time_and_where_steps_are_shorter_now() -> None:
    keeps_up = [step(i, launch_ms=95, keeps_up=True) for i in range(20)]
    slow = [step(i, launch_ms=130, keeps_up=True) for i in range(20)]
    queue_is_full = [step(i) for i in range(20, 2_100)]

    assert launching(*keeps_up, *queue_is_full) == 0
    assert launching(*slow) == 0


# -- what counts as late of several hosts


def late_ms(loads_ms: Sequence[float], slower_ms: float = 0) -> list[float]:
    """By how much ranks count as late whose batches take this long.

    The device of the first one idles for 27 ms, and those of the others wait for it. That of the
    second one is so much slower.
    """
    ranks = [labels_of(rank) for rank in range(len(loads_ms))]
    pace = HostPace()
    pace.start_again(ranks)
    for number in range(40):
        facts = []
        for rank, labels in enumerate(ranks):
            idle_ns, more_ns = round(27 * MS * (rank == 0)), round(slower_ms * MS * (rank == 1))
            each = step(number, data_ms=loads_ms[rank])._replace(
                took_ns=127 * MS,
                wait_ns=37 * MS - idle_ns - more_ns,
                phases_ns=(idle_ns, 90 * MS + more_ns, 0, 0, 0),
                paced_ns=(idle_ns, 0, 0, 0, 0),
            )
            facts.append(each)
            pace.begin(labels, [each])
        adjusted = pace.adjusted(facts)
    return [(each.took_ns - each.wait_ns) / MS - 90 for each in adjusted]


@pytest.mark.parametrize(("load_ms", "late"), [(80, 27), (72, 27), (60, 15), (46, 1), (30, 0)])
def test_a_host_that_waits_for_a_late_one_is_late_less_what_it_needs_less(
    load_ms: float, late: float
) -> None:
    assert late_ms([72, load_ms, 0, 0]) == pytest.approx([27, late, 0, 0])
    assert late_ms([72, load_ms, load_ms, 0, 0, 0]) == pytest.approx([27, late, late, 0, 0, 0])


def test_a_rank_with_a_late_host_and_a_slow_device_is_no_later_than_the_one_it_waits_for() -> None:
    assert late_ms([72, 72, 0, 0], slower_ms=20) == pytest.approx([27, 27, 0, 0])
    assert late_ms([72, 60, 0, 0], slower_ms=20) == pytest.approx([27, 20, 0, 0])


def test_hosts_that_are_slow_alike_are_not_late() -> None:
    assert late_ms([72, 72, 72, 72]) == pytest.approx([0, 0, 0, 0])
