"""What a rank needed for its own work in the last minute, as the rules over all nodes read it."""

from __future__ import annotations

import random

import pytest

from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.work_times import WorkTime, WorkTimes
from otel_ddp.vocabulary.words import WORK_PHASES

LABELS = (("group", "g"), ("run", "r"), ("node", "n"), ("rank", "0"))
RANK = RankState(LABELS, world_size=4, own_world_size=4, waits_known=True)
OTHER = WORK_PHASES.index("other")


class Told:
    """A rank that makes steps, and the agent's look at it."""

    def __init__(self, rank: RankState = RANK) -> None:
        self.times = WorkTimes()
        self.rank = rank
        self.now_ns = 10**18
        self.number = 0

    def step(
        self, steps: int = 1, *, work_ms: float = 60, wait_ms: float = 20, unusual: bool = False
    ) -> None:
        """So many steps, a tenth of the work in `other`."""
        facts = []
        for _ in range(steps):
            self.number += 1
            work_ns, wait_ns = int(work_ms * 1e6), int(wait_ms * 1e6)
            self.now_ns += work_ns + wait_ns
            phases_ns = [0] * len(WORK_PHASES)
            phases_ns[OTHER] = work_ns // 10
            facts.append(
                StepFacts(
                    *(self.number, self.now_ns, work_ns + wait_ns, wait_ns),
                    *(tuple(phases_ns), {}, unusual, 0),
                )
            )
        self.times.feed(self.rank, Observation(self.now_ns, facts=facts))

    def told(self, after_s: float = 0.0) -> WorkTime | None:
        self.now_ns += max(int(after_s * 1e9), limits.WORK_EVERY_NS)
        self.times.poll(self.now_ns)
        return self.times.now.get(LABELS)


def test_a_rank_tells_its_work_in_each_third_of_a_minute_once_that_is_full() -> None:
    told = Told()
    told.step(limits.FIRST_STEPS, work_ms=900)
    told.step(700)
    early = told.told()
    told.step(100)
    full = told.told()
    told.step(250, work_ms=80, wait_ms=0)
    later = told.told()

    assert early is None
    assert full == WorkTime((0.06, 0.06, 0.06), 0.02)
    assert later == WorkTime((0.06, 0.06, 0.08), 0.0)


def test_a_rank_is_late_in_each_third_within_52_seconds() -> None:
    told = Told()
    told.step(1000, work_ms=60, wait_ms=0)
    # 51.2 and 52 s: more than half of the oldest third as well.
    told.step(640, work_ms=80, wait_ms=0)
    before = told.told()
    told.step(10, work_ms=80, wait_ms=0)
    after = told.told()

    assert before is not None
    assert after is not None
    assert before.thirds_s[0] < 0.08
    assert after.thirds_s == (0.08, 0.08, 0.08)


def test_steps_that_take_longer_fill_the_window_by_their_number() -> None:
    told = Told()
    told.step(limits.FIRST_STEPS + limits.LENGTHS[0], work_ms=8_000, wait_ms=2_000)
    almost = told.told()
    told.step(work_ms=8_000, wait_ms=2_000)
    enough = told.told()
    # Of steps of more than 20 s there are too few in half an hour.
    told.step(limits.LENGTHS[0], work_ms=21_000, wait_ms=0)

    assert almost is None
    assert enough == WorkTime((8.0, 8.0, 8.0), 2.0)
    assert told.told() is None


@pytest.mark.parametrize(("deviation", "steps"), [(0.05, 90), (0.10, 300), (0.15, 675)])
def test_the_more_steps_vary_the_more_of_them_it_takes(deviation: float, steps: int) -> None:
    told = Told()
    chance = random.Random(1)
    told.step(limits.FIRST_STEPS)

    made = 0
    while told.told() is None:
        # Of a second each: a minute would be over sooner.
        told.step(work_ms=1000 * chance.gauss(1.0, deviation), wait_ms=0)
        made += 1

    assert made == pytest.approx(steps + 1, rel=0.3)


def test_unusual_steps_and_pauses_change_nothing() -> None:
    told = Told()
    for _ in range(30):
        told.step(40)
        told.step(work_ms=700)
        told.step(5, work_ms=500, unusual=True)

    assert told.told() == WorkTime((0.06, 0.06, 0.06), 0.02)


def test_a_phase_with_collectives_of_the_programs_own_is_no_work() -> None:
    told = Told()
    told.step(1000)
    whole = told.told()
    told.rank = RANK._replace(own_collectives=("other",))
    told.step(100)
    cleared = told.told()
    told.step(1000)

    assert whole == WorkTime((0.06, 0.06, 0.06), 0.02)
    # No step by the one account is compared with a step by the other.
    assert cleared is None
    assert told.told() == WorkTime((0.054, 0.054, 0.054), pytest.approx(0.026))


@pytest.mark.parametrize(
    "rank",
    [
        RANK._replace(waits_known=False),
        RANK._replace(own_world_size=1),
        RANK._replace(own_world_size=1, world_size=1),
    ],
    ids=["waits unknown", "beside the training", "alone"],
)
def test_a_rank_that_is_compared_with_no_other_tells_nothing(rank: RankState) -> None:
    told = Told(rank)
    told.step(2000)

    assert told.told() is None


def test_a_rank_that_makes_no_steps_any_more_tells_nothing() -> None:
    told = Told()
    told.step(1000)
    soon = told.told(after_s=50)

    assert soon is not None
    assert told.told(after_s=20) is None


def test_a_process_that_is_started_again_begins_anew() -> None:
    told = Told()
    told.step(1000)
    told.rank = RANK._replace(began_ns=1)
    told.step(500)

    assert told.told() is None
