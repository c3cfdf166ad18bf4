"""Which node keeps the others waiting: its ranks are late alike, and no ranks elsewhere are."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import ranks
from golden import Golden
from make import labels_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Change
from ranks import Job

LATE = {"backward": 0.02}


def late(*ranks: int, more: Mapping[str, float] = LATE) -> dict[int, Mapping[str, float]]:
    return dict.fromkeys(ranks, more)


def summary(changes: list[Change]) -> list[tuple[str, str, bool]]:
    """Rank or node, phase, opened."""
    return [each[1:] for each in ranks.summary(changes)]


@pytest.mark.parametrize(
    ("ranks", "nodes", "who", "named"),
    [
        (4, 2, (2, 3), ["n2"]),
        (16, 2, range(8), ["n1"]),
        (8, 4, (0, 1, 2, 3), ["n1", "n2"]),
    ],
    ids=["one of two", "eight ranks", "two of four"],
)
def test_a_node_whose_ranks_are_late_alike_is_named_once(
    ranks: int, nodes: int, who: tuple[int, ...], named: list[str]
) -> None:
    job = Job(ranks, nodes=nodes)
    assert job.steps(150) == []

    changes = job.steps(400, late(*who))

    assert summary(changes) == [(node, "backward", True) for node in named]
    assert all(150 < (each.verdict.step or 0) <= 270 for each in changes)


@pytest.mark.parametrize(
    ("ranks", "nodes", "who", "named"),
    [
        (4, 2, (3,), ["3"]),
        (16, 2, (8, 9), ["8", "9"]),
        (4, 1, (0, 1), ["0", "1"]),
        (3, 3, (1,), ["1"]),
    ],
    ids=["of two", "two of eight", "of one node", "of one each"],
)
def test_late_ranks_beside_healthy_ones_on_their_node_are_named_themselves(
    ranks: int, nodes: int, who: tuple[int, ...], named: list[str]
) -> None:
    job = Job(ranks, nodes=nodes)
    job.steps(150)

    assert summary(job.steps(400, late(*who))) == [(rank, "backward", True) for rank in named]


@pytest.mark.parametrize(
    ("ranks", "nodes", "who"),
    [(6, 3, range(4)), (6, 2, range(5))],
    ids=["two of three", "all but one rank"],
)
def test_of_nodes_of_which_most_are_late_the_others_are_fast(
    ranks: int, nodes: int, who: range
) -> None:
    job = Job(ranks, nodes=nodes)
    job.steps(150)

    assert job.steps(600, late(*who)) == []


def test_a_single_rank_on_a_node_of_its_own_makes_no_node_of_eight_late() -> None:
    job = Job(9, nodes=2)
    for rank in range(9):
        job.told.know(rank, labels=labels_of(rank, node="n2" if rank == 8 else "n1"))
    job.steps(150)

    assert job.steps(400, late(*range(8))) == []


# -- what is said of it


def test_the_verdict_says_how_late_all_are_and_what_a_step_would_take_without_them(
    golden: Golden,
) -> None:
    job = Job(8, nodes=2, world_size=8)
    job.steps(150)

    ((verdict, _),) = job.steps(150, late(4, 5, 6, 7))

    assert dict(verdict.labels) == {"group": "g", "run": "r", "node": "n2"}
    golden.check(verdict.sentence)
    assert verdict.evidence["ranks"] == ["4", "5", "6", "7"]


def test_a_rank_that_is_the_latest_by_far_does_not_hide_its_node() -> None:
    job = Job(8, nodes=2)
    job.steps(150)

    changes = job.steps(400, {**late(4, 5, 6), 7: {"backward": 0.05}})

    assert summary(changes) == [("n2", "backward", True)]


def test_a_node_with_more_to_do_is_unequal_work() -> None:
    job = Job(8, nodes=2)
    more = {"forward": 0.005, "backward": 0.010}
    given = {rank: {"work": 1200} for rank in range(4)}

    ((verdict, _),) = job.steps(200, late(0, 1, 2, 3, more=more), given)

    assert verdict.kind == "imbalance"
    assert "each of the 4 ranks of n1 has 20 % more tokens or samples" in verdict.sentence


def test_a_late_rank_has_its_own_what_if_and_two_have_one_together(golden: Golden) -> None:
    job = Job(8)
    ((alone, _),) = job.steps(150, late(1))
    (both,) = [each.verdict for each in job.steps(150, late(1, 2))]

    golden.check(alone.sentence, both.sentence)


# -- one incident


def test_a_verdict_on_a_rank_becomes_part_of_that_on_its_node_and_the_other_way_round() -> None:
    job = Job(8, nodes=2)
    job.steps(150)
    assert summary(job.steps(200, late(4))) == [("4", "backward", True)]

    assert summary(job.steps(200, late(4, 5, 6, 7))) == [
        ("4", "backward", False),
        ("n2", "backward", True),
    ]
    left = job.steps(limits.LENGTHS[-1] + 50, late(4))

    assert summary(left) == [("n2", "backward", False), ("4", "backward", True)]
    assert summary(job.steps(200)) == [("4", "backward", False)]


def test_what_the_others_lose_is_charged_once_and_to_all_ranks_of_the_node() -> None:
    job = Job(8, nodes=2, world_size=8)
    job.steps(150)
    (opened,) = job.steps(500, late(4, 5, 6, 7))
    (closed,) = job.steps(120)

    # 500 steps, and those until it is seen to be over; four ranks wait.
    lost_s = [each.lost_s for each in job.report().ranks]
    assert sum(lost_s) == pytest.approx(545 * 0.02 * 4, rel=0.1)
    assert lost_s == pytest.approx([0] * 4 + [sum(lost_s) / 4] * 4)
    assert closed.verdict.evidence["lost_s"] == pytest.approx(sum(lost_s), abs=0.01)
    assert opened.verdict.key == closed.verdict.key


def test_what_a_rank_was_charged_for_is_not_charged_again_to_its_node() -> None:
    job = Job(8, nodes=2, world_size=801)
    job.steps(150)
    job.steps(200, late(4))
    job.steps(300, late(4, 5, 6, 7))

    lost_s = sum(each.lost_s for each in job.report().ranks)
    assert lost_s == pytest.approx(500 * 0.02 * 800, rel=0.03)


def test_a_node_whose_ranks_have_left_is_late_no_more() -> None:
    job = Job(6, nodes=3)
    job.steps(150)
    job.steps(150, late(4, 5))
    for rank in (4, 5):
        job.told.forget(rank)
        job.ranks.remove(rank)

    assert summary(job.steps(200)) == [("n3", "backward", False)]


def test_one_odd_rank_of_many_leaves_out_no_step_and_is_not_late() -> None:
    job = Job(32, nodes=4)
    odd = {20: {"other": 0.1}}
    changes = job.steps(400, {**late(*range(8)), **odd}, {20: {"unusual": True}})

    assert summary(changes) == [("n1", "backward", True)]
    assert job.report().insufficient == ""
