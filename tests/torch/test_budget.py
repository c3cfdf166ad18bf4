"""The budget, on a clock of the test's own: what it takes, and which steps are measured."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_ddp.torch.steps.budget import Budget, Calibration, Cost, SampledSteps, in_sample

US, MS, S = 1_000, 1_000_000, 1_000_000_000
SHARE = 0.005


class Thread:
    """A training thread that does what its budget says."""

    def __init__(self) -> None:
        self.budget = Budget(SHARE)
        self.number, self.now_ns, self.measures = 0, 0, True
        self.measured: list[int] = []
        # What was taken in the last ten seconds, the most in ten seconds, and of one step.
        self._last: deque[tuple[int, int]] = deque()
        self._sum_ns = self.most_ns = self.largest_ns = 0

    def step(self, alone_ns: int, to_measure_ns: int, beside_ns: int = 0) -> None:
        """One step: how long it takes without us, what measuring takes, and what it takes else."""
        self.number += 1
        took_ns = (to_measure_ns if self.measures else 0) + beside_ns
        self.now_ns += alone_ns + took_ns
        self._sum_ns += took_ns
        self._last.append((self.now_ns, took_ns))
        while self._last[0][0] <= self.now_ns - 10 * S:
            self._sum_ns -= self._last.popleft()[1]
        self.most_ns = max(self.most_ns, self._sum_ns)
        if self.measures:
            self.measured.append(self.number)
            self.largest_ns = max(self.largest_ns, took_ns)
        self.budget.spend(took_ns, self.measures)
        self.budget.step_ended(alone_ns + took_ns, self.measures)
        self.measures = self.budget.measures(self.number + 1)

    def steps(self, seconds: int, alone_ns: int, to_measure_ns: int, beside_ns: int = 0) -> None:
        until_ns = self.now_ns + seconds * S
        while self.now_ns < until_ns:
            self.step(alone_ns, to_measure_ns, beside_ns)


_STEPS = st.tuples(
    # A second of steps of one kind: how long they take, and what measuring and all else takes.
    st.sampled_from([500 * US, MS, 2 * MS, 5 * MS, 20 * MS, 100 * MS, S]),
    st.sampled_from([20 * US, 100 * US, 300 * US, MS, 2 * MS]),
    st.sampled_from([0, US, 2 * US]),
)


@settings(deadline=None, database=None, derandomize=True, max_examples=40)
@given(st.lists(_STEPS, min_size=1, max_size=30))
def test_no_ten_seconds_cost_more_than_the_share_and_one_measured_step(
    kinds: list[tuple[int, int, int]],
) -> None:
    thread = Thread()

    for alone_ns, to_measure_ns, beside_ns in kinds:
        thread.steps(1, alone_ns, to_measure_ns, beside_ns)

    assert thread.most_ns <= SHARE * 10 * S + thread.largest_ns


@pytest.mark.parametrize(
    ("alone_ns", "to_measure_ns", "beside_ns", "every"),
    [
        (2 * MS, 100 * US, 4 * US, {32, 64}),
        (5 * MS, 100 * US, 8 * US, {8, 16}),
        (20 * MS, 100 * US, 8 * US, {2}),
        (20 * MS, 300 * US, 8 * US, {4, 8}),
        (60 * MS, 250 * US, 8 * US, {1}),
        (100 * MS, 300 * US, 8 * US, {1}),
    ],
)
def test_as_many_steps_are_measured_as_the_share_pays_for(
    alone_ns: int, to_measure_ns: int, beside_ns: int, every: set[int]
) -> None:
    thread = Thread()

    thread.steps(60, alone_ns, to_measure_ns, beside_ns)

    assert thread.budget.every in every
    assert 0.5 * SHARE < thread.budget.share <= SHARE or every == {1}


@pytest.mark.parametrize(
    ("alone_ns", "to_measure_ns", "every"), [(77 * MS, 5 * MS, 16), (20 * MS, 10 * MS, 128)]
)
def test_a_measured_step_may_cost_more_than_the_bucket_holds(
    alone_ns: int, to_measure_ns: int, every: int
) -> None:
    thread = Thread()

    thread.steps(4, alone_ns, to_measure_ns)
    assert thread.budget.every == every
    thread.steps(60, alone_ns, to_measure_ns)

    assert thread.budget.every == every
    assert len(thread.measured) * to_measure_ns <= SHARE * thread.now_ns + 2 * to_measure_ns


def test_steps_that_cost_more_than_the_share_to_count_leave_a_tenth_to_measured_ones() -> None:
    thread = Thread()

    thread.steps(20, 500 * US, 100 * US, 5 * US)
    before = len(thread.measured)
    thread.steps(60, 500 * US, 100 * US, 5 * US)

    measured = len(thread.measured) - before
    assert 0.02 * SHARE * 60 * S < measured * 100 * US < 0.1 * SHARE * 60 * S


def test_a_step_that_costs_very_much_is_no_reason_to_measure_fewer_for_long() -> None:
    thread = Thread()
    thread.steps(30, 60 * MS, 100 * US)
    thread.step(60 * MS, 200 * MS)

    thread.steps(30, 60 * MS, 100 * US)

    assert thread.budget.every == 1
    assert len(thread.measured) > 0.9 * thread.number


def test_no_more_steps_are_measured_than_all_ranks_together_may() -> None:
    thread = Thread()

    thread.budget.measure_at_most_one_of(8)
    thread.steps(20, 100 * MS, 100 * US)
    # By chance a step is a little longer: that is no reason to change.
    thread.budget.measure_at_most_one_of(4)
    assert thread.budget.every == 8
    assert len(thread.measured) < thread.number / 6

    thread.budget.measure_at_most_one_of(2)
    assert thread.budget.every == 2


def test_a_first_step_that_costs_nothing_shows_no_cost() -> None:
    thread = Thread()
    thread.step(20 * MS, 0)

    thread.steps(20, 20 * MS, 300 * US)

    assert thread.budget.every in (4, 8)


def test_what_is_forgiven_leaves_its_cost_known() -> None:
    thread = Thread()
    for _ in range(20):
        thread.step(20 * MS, 300 * US)
        thread.budget.forgive()

    assert thread.budget.allows
    assert thread.budget.every in (4, 8)


def test_a_group_of_counted_steps_counts_as_its_steps() -> None:
    budget = Budget(SHARE)

    for _ in range(40):
        budget.spend(300 * US, measured=True)
        budget.step_ended(20 * MS, measured=True)
        budget.step_ended(7 * 20 * MS, measured=False, steps=7)

    # 300 us in one of four steps of 20 ms; without the number of steps, in one.
    assert budget.share == pytest.approx(300 * US / 4 / (20 * MS))


def test_the_first_steps_are_free_and_show_the_cost_of_the_others() -> None:
    now_ns = 0
    steps, work = SimpleNamespace(count=0), SimpleNamespace(hook_ns=0)
    progress: Any = SimpleNamespace(
        steps=steps,
        work=work,
        recorder=SimpleNamespace(gate=SimpleNamespace(log_ns=0)),
        phases=SimpleNamespace(clock=lambda: now_ns),
        counted=SimpleNamespace(ended_ns=0),
        flush_rarely=lambda _: None,
    )
    sampled, calls = SampledSteps(), SimpleNamespace(least_every=lambda _: 1)
    cost = Cost(progress, sampled, calls)  # type: ignore[arg-type]
    cost.keep_to(SHARE)
    budget = cost.budget
    assert budget is not None

    for _ in range(63):
        now_ns += 20 * MS
        cost.took(200 * US)
        assert cost.step_ends(now_ns, True)[0]
        steps.count += 1

    assert budget.allows
    assert budget.every == 4
    # By the initial calibration.
    assert budget.share == pytest.approx(1.5 * 200 * US / 4 / (20 * MS))


def test_more_steps_are_measured_once_they_take_longer() -> None:
    thread = Thread()
    thread.steps(20, 2 * MS, 100 * US)
    before = thread.budget.every

    thread.steps(40, 100 * MS, 100 * US)

    assert (before >= 16, thread.budget.every) == (True, 1)


def sample(every: int, most: int = 100_000) -> list[int]:
    return [number for number in range(1, most + 1) if in_sample(number, every)]


def test_ranks_with_other_shares_have_steps_in_common() -> None:
    sets = [set(sample(1 << power)) for power in range(8)]

    assert all(larger > smaller for larger, smaller in pairwise(sets))
    assert [round(100_000 / len(each)) for each in sets] == [1 << power for power in range(8)]


@pytest.mark.parametrize("every", [2, 4, 16, 64])
def test_no_length_of_a_users_loop_is_hit_or_missed(every: int) -> None:
    found = sample(every)

    for length in range(2, 17):
        for at in range(0, len(found) - 90, 90):
            assert most_alike(found[at : at + 90], length) <= 2 * 90 / length + 1


def most_alike(numbers: Iterable[int], length: int) -> int:
    return max(Counter(number % length for number in numbers).values())


def test_what_hooks_do_not_see_is_found_beside_steps_without_them() -> None:
    calibration = Calibration()

    for noise in range(-8, 8):
        calibration.add(5_180 * US + noise * 10 * US, 5 * MS, 90 * US)

    assert 1.8 < calibration.factor < 2.2


def test_steps_that_differ_by_more_than_hooks_take_tell_nothing_of_hooks() -> None:
    calibration, rng = Calibration(), Random(1)
    before = calibration.factor

    for _ in range(320):
        calibration.add(int(rng.gauss(40, 4) * MS), int(rng.gauss(40, 4) * MS), 150 * US)
        assert calibration.factor == before
