"""Where steps are slow, a clear case is named after twelve steps, and what is not clear as ever."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from otel_ddp.diagnosis.verdict import Change
from ranks import Job, summary


def late(*ranks: int, share: float, of: Job) -> Mapping[int, Mapping[str, float]]:
    return {rank: {"backward": share * of.slower * 0.1} for rank in ranks}


def named(changes: list[Change], began: int) -> list[tuple[str, str, int]]:
    """Rank or node, phase, and after how many steps."""
    assert all(each.opened for each in changes)
    steps = [(each.verdict.step or 0) - began for each in changes]
    return [(who, phase, n) for (_, who, phase, _), n in zip(summary(changes), steps, strict=True)]


@pytest.mark.parametrize(
    ("slower", "after"),
    [(100, 12), (10, 12), (5, 20), (1.5, 65), (1, 76)],
    ids=lambda each: str(each),
)
def test_a_late_rank_is_named_as_soon_as_it_was_late_for_12_s_and_12_steps(
    slower: float, after: int
) -> None:
    job = Job(4, slower=slower)
    # The steps begin in the middle of a stride.
    assert job.steps(124) == []

    ((who, phase, steps),) = named(job.steps(120, late(2, share=0.25, of=job)), 124)

    assert (who, phase) == ("2", "backward")
    assert steps == pytest.approx(after, abs=1)


def test_of_ten_slow_steps_nothing_is_said() -> None:
    job = Job(4, slower=10)
    job.steps(124)

    assert job.steps(10, late(2, share=1.0, of=job)) == []
    assert job.steps(200) == []


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (64, 8)])
def test_a_late_node_is_named_as_soon_and_none_of_its_ranks(ranks: int, nodes: int) -> None:
    job = Job(ranks, nodes=nodes, slower=10)
    job.steps(124)

    own = range(ranks // nodes, 2 * ranks // nodes)
    assert named(job.steps(40, late(*own, share=0.25, of=job)), 124) == [("n2", "backward", 12)]


def test_where_steps_vary_as_much_it_takes_as_many_as_in_fast_ones() -> None:
    job = Job(4, slower=10, vary=0.3)
    job.steps(124)

    assert job.steps(60, late(2, share=0.25, of=job)) == []
    ((who, _, _),) = named(job.steps(60, late(2, share=0.25, of=job)), 124)
    assert who == "2"


def test_what_was_named_soon_is_charged_for_each_step_once() -> None:
    job = Job(4, slower=10)
    job.steps(124)

    changes = job.steps(76, late(2, share=0.25, of=job))

    assert len(changes) == 1
    (verdict,) = job.detector.present()
    # Three ranks waited a quarter of a second in each of 76 steps.
    assert verdict.evidence["lost_s"] == pytest.approx(3 * 0.25 * 76, rel=0.05)


def test_it_ends_as_soon() -> None:
    job = Job(4, slower=10)
    job.steps(124)
    job.steps(60, late(2, share=0.25, of=job))

    changes = job.steps(30)

    assert [opened for _, opened in changes] == [False]
