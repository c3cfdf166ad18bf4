"""A rank that stalls again and again: what is regular, what it costs, and what is neither."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from otel_ddp.diagnosis.verdict import Change
from ranks import STEP_S, Job, summary

# What each rank needs more than usual in a step, in seconds by phase.
Trouble = Callable[[int], dict[int, dict[str, float]]]


def train(job: Job, steps: int, trouble: Trouble) -> list[Change]:
    return [change for _ in range(steps) for change in job.steps(1, trouble(job.number + 1))]


def recurring(changes: list[Change]) -> list[tuple[str, str, bool]]:
    """Rank, phase, and whether it was opened."""
    return [each[1:] for each in summary(changes) if each[0] == "recurring"]


def balanced(number: int) -> dict[int, dict[str, float]]:
    return {}


def every_50th(number: int) -> dict[int, dict[str, float]]:
    """A loader that stalls 600 ms in every 50th batch."""
    return {1: {"data": 0.6}} if number % 50 == 0 else {}


def test_a_loader_that_stalls_in_every_50th_batch_is_named_with_its_cost() -> None:
    job = Job(8)
    changes = train(job, 400, every_50th)

    assert recurring(changes) == [("1", "data", True)]
    (verdict,) = job.detector.present()
    assert verdict.sentence.startswith("rank 1 (n1) stalls in data about every 50 steps: ")
    assert verdict.evidence["recurs_every"] == 50
    assert verdict.evidence["stall_s"] == pytest.approx(0.6, rel=0.05)
    # 0.6 of 50 x 0.1 and 0.6 seconds.
    assert verdict.evidence["lost_per_s"] == pytest.approx(7 * 0.6 / 5.6, rel=0.05)
    # Seven stalls: that of step 50, and those since.
    assert verdict.evidence["lost_s"] == pytest.approx(7 * 7.5 * 0.6, rel=0.1)
    lost_s = job.detector.report().ranks[1].lost_s
    assert lost_s == pytest.approx(verdict.evidence["lost_s"], abs=0.01)


@pytest.mark.parametrize("ends", [False, True])
def test_it_is_over_when_no_stall_comes_any_more_or_the_rank_has_ended(ends: bool) -> None:
    job = Job(2)
    ((opened, _),) = train(job, 610, every_50th)
    last_ns = job.now_ns - 10 * STEP_S * 1e9
    if ends:
        job.told.forget(1)
    over = train(job, 200, balanced)

    assert recurring(over) == [("1", "data", False)]
    verdict = over[0].verdict
    assert verdict.since_ns == opened.since_ns
    assert verdict.evidence["lost_s"] == pytest.approx(12 * 0.6, rel=0.1)
    # The last one, not the moment in which it was missed.
    assert verdict.until_ns == pytest.approx(last_ns, abs=1e6)
    assert job.detector.present() == []


CHANCE = random.Random(11)
# How many ranks, how many steps, and for how long the loader of this rank stalls in this step.
NOT_TOLD: dict[str, tuple[int, int, Callable[[int, int], float]]] = {
    "at random, however dear": (
        *(2, 10_000),
        lambda _, __: CHANCE.uniform(0.4, 0.8) if CHANCE.random() < 0.02 else 0.0,
    ),
    "of all ranks in the same step": (4, 1000, lambda _, n: 0.6 * (n % 50 == 0)),
    "of all ranks in other steps": (4, 2000, lambda rank, n: 0.6 * (n % 40 == 10 * rank)),
    "cheap": (4, 2000, lambda rank, n: 0.2 * (rank == 1 and n % 100 == 0)),
}


@pytest.mark.parametrize(("ranks", "steps", "stall_s"), NOT_TOLD.values(), ids=NOT_TOLD)
def test_stalls_that_are_no_fault_of_one_rank_or_cost_little_are_not_told(
    ranks: int, steps: int, stall_s: Callable[[int, int], float]
) -> None:
    def trouble(number: int) -> dict[int, dict[str, float]]:
        return {rank: {"data": stall_s(rank, number)} for rank in range(ranks)}

    assert recurring(train(Job(ranks), steps, trouble)) == []


def collect(job: Job, steps: int, due: Callable[[int, int], float]) -> list[Change]:
    """Each rank collects garbage for so many seconds: *due*, of its number and the step's."""
    changes = []
    for _ in range(steps):
        took = {rank: due(rank, job.number + 1) for rank in job.ranks}
        late = {rank: {"other": took_s} for rank, took_s in took.items()}
        ns = {rank: round(took_s * 1e9) for rank, took_s in took.items()}
        given = {rank: {"garbage_ns": each, "unusual": each > 0} for rank, each in ns.items()}
        changes += job.steps(1, late, given)
    return changes


def test_a_rank_that_collects_garbage_more_often_than_the_others_is_named() -> None:
    job = Job(4)

    def due(rank: int, number: int) -> float:
        return 0.08 if number % (5.5 if rank == 1 else 11) < 1 else 0.0

    changes = collect(job, 150, due)

    assert recurring(changes) == [("1", "garbage", True)]
    (verdict,) = job.detector.present()
    assert "gc.freeze()" in verdict.sentence
    assert verdict.evidence["stall_s"] == pytest.approx(0.08, rel=0.05)


def test_ranks_that_all_collect_as_much_garbage_at_other_steps_are_not_named() -> None:
    assert collect(Job(4), 1000, lambda rank, number: 0.08 * (number % 8 == 2 * rank)) == []


def test_steps_that_are_late_one_after_the_other_are_one_stall() -> None:
    def trouble(number: int) -> dict[int, dict[str, float]]:
        return {1: {"forward": 0.07}} if number % 25 < 3 else {}

    job = Job(2)

    assert recurring(train(job, 300, trouble)) == [("1", "forward", True)]
    (verdict,) = job.detector.present()
    assert verdict.evidence["stall_s"] == pytest.approx(0.21, rel=0.05)


def test_evaluations_that_are_long_on_all_ranks_or_unequal_are_no_stalls() -> None:
    job, chance = Job(4), random.Random(3)
    for _ in range(100):
        took = {rank: {"other": chance.uniform(0.5, 1.0)} for rank in job.ranks}
        assert job.steps(1, took, {rank: {"unusual": True} for rank in job.ranks}) == []
        assert job.steps(chance.randrange(6, 20)) == []


def test_in_phases_that_are_not_compared_no_stall_is_told() -> None:
    job = Job(2)
    job.told.know(0, own_collectives=("data",))
    assert recurring(train(job, 600, every_50th)) == []
