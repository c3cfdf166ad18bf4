"""A rank that stalls again and again: what is regular, what it costs, and what is neither."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from make import step_facts
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.verdict import Change
from ranks import Told

MS = 1_000_000
STEP_MS = 80.0
PLAIN = {"data": 5.0, "forward": 20.0, "backward": 40.0, "optimizer": 10.0, "other": 5.0}

# What a rank needs more than usual in a step, in milliseconds by phase; or None, where the step is
# unusual.
Trouble = Callable[[int, int], dict[str, float] | None]


class Job:
    """Ranks that wait for each other in each step."""

    def __init__(self, ranks: int = 2, jitter: float = 0.05) -> None:
        self.detector = Stragglers()
        self.told = Told(self.detector)
        self.ranks, self.jitter = ranks, jitter
        self.number, self.now_ns = 0, 1_700_000_000_000_000_000
        self._chance = random.Random(7)

    def train(self, steps: int, trouble: Trouble) -> list[Change]:
        changes = []
        for _ in range(steps):
            self.number += 1
            needs, unusual = [], []
            for rank in range(self.ranks):
                more = trouble(rank, self.number)
                need = {
                    word: (ms * self._chance.lognormvariate(0, self.jitter))
                    + (more or {}).get(word, 0.0)
                    for word, ms in PLAIN.items()
                }
                needs.append(need)
                unusual.append(more is None)
            took_ms = max(sum(need.values()) for need in needs)
            self.now_ns += round(took_ms * MS)
            for rank, need in enumerate(needs):
                facts = step_facts(
                    *(self.number, self.now_ns, need, took_ms), unusual=unusual[rank]
                )
                self.told.feed(rank, [facts])
            changes += self.detector.poll(0)
        return changes

    def recurring(self, changes: list[Change]) -> list[tuple[str, str, bool]]:
        """Rank, phase, and whether it was opened."""
        return [
            (dict(each.labels)["rank"], each.phase, opened)
            for each, opened in changes
            if each.kind == "recurring"
        ]


def balanced(rank: int, number: int) -> dict[str, float]:
    return {}


def every_50th(rank: int, number: int) -> dict[str, float]:
    """A loader that stalls 600 ms in every 50th batch."""
    return {"data": 600.0} if rank == 1 and number % 50 == 0 else {}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_loader_that_stalls_in_every_50th_batch_is_named_with_its_cost(ranks: int) -> None:
    job = Job(ranks)
    changes = job.train(400, every_50th)

    assert job.recurring(changes) == [("1", "data", True)]
    (verdict,) = job.detector.present()
    assert verdict.sentence.startswith("rank 1 (n1) stalls in data about every 50 steps: ")
    assert verdict.evidence["recurs_every"] == 50
    assert verdict.evidence["stall_s"] == pytest.approx(0.6, rel=0.05)
    # 0.6 of 50 x 0.08 and 0.6 seconds.
    assert verdict.evidence["lost_per_s"] == pytest.approx((ranks - 1) * 0.6 / 4.8, rel=0.15)
    # Seven stalls: that of step 50, and those since.
    assert verdict.evidence["lost_s"] == pytest.approx((ranks - 1) * 7.5 * 0.6, rel=0.1)
    lost_s = job.detector.report().ranks[1].lost_s
    assert lost_s == pytest.approx(verdict.evidence["lost_s"], abs=0.01)


def test_it_is_over_when_no_stall_comes_any_more() -> None:
    job = Job()
    opened = job.train(410, every_50th)
    since_ns = opened[0].verdict.since_ns
    job.train(200, every_50th)
    over = job.train(200, balanced)

    assert job.recurring(over) == [("1", "data", False)]
    verdict = over[0].verdict
    assert verdict.since_ns == since_ns
    # The last one, not the moment in which it was missed.
    assert verdict.until_ns < job.now_ns - 150 * STEP_MS * MS
    assert verdict.evidence["lost_s"] == pytest.approx(12 * 0.6, rel=0.1)


def test_pauses_at_random_among_them_do_not_hide_regular_ones() -> None:
    chance = random.Random(3)

    def trouble(rank: int, number: int) -> dict[str, float]:
        more = every_50th(rank, number)
        if chance.random() < 0.01:
            word = chance.choice(list(PLAIN))
            more = {**more, word: more.get(word, 0.0) + chance.uniform(50, 300)}
        return more

    job = Job(4)
    assert job.recurring(job.train(1500, trouble))[0] == ("1", "data", True)


def test_pauses_at_random_are_not_regular_however_dear() -> None:
    chance = random.Random(11)

    def trouble(rank: int, number: int) -> dict[str, float]:
        return {"data": chance.uniform(400, 800)} if chance.random() < 0.02 else {}

    job = Job(2)
    assert job.recurring(job.train(30_000, trouble)) == []


def test_what_all_ranks_do_in_the_same_step_keeps_no_rank_waiting() -> None:
    job = Job(4)
    changes = job.train(600, lambda rank, number: {"data": 600.0} if number % 50 == 0 else {})
    assert changes == []


def test_steps_that_save_or_collect_garbage_are_no_stalls() -> None:
    job = Job(2)

    def trouble(rank: int, number: int) -> dict[str, float] | None:
        return None if rank == 0 and number % 40 == 0 else {}

    assert job.train(600, trouble) == []


def test_what_costs_little_is_not_told() -> None:
    job = Job(2)
    changes = job.train(3000, lambda rank, n: {"data": 200.0} if rank and n % 100 == 0 else {})
    assert changes == []


def test_in_phases_that_are_not_compared_no_stall_is_told() -> None:
    job = Job(2)
    job.told.know(0, own_collectives=("data",))
    assert job.recurring(job.train(600, every_50th)) == []


def test_a_rank_that_ends_ends_its_verdict() -> None:
    job = Job(2)
    job.train(410, every_50th)
    job.told.forget(1)
    assert job.recurring(job.detector.poll(0)) == [("1", "data", False)]
    assert job.detector.present() == []
