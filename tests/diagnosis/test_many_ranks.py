"""Steps of very many ranks: what is kept of them, and who is late among them."""

from __future__ import annotations

import pytest

from make import labels_of, step_facts
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.kept_facts import kept
from ranks import Job

MANY = limits.MANY_RANKS
ON_HOST = step_facts(7, 10**18, {"data": 1, "forward": 5, "comm_wait": 2}, work=512)
ON_DEVICE = ON_HOST._replace(
    unusual=True,
    unusual_ns={"checkpoint": 5},
    paced_ns=(1, 2, 3, 4, 5),
    host_ns=(0, 9, 8, 7, 6),
    behind_ns=-3,
)


@pytest.mark.parametrize(
    "each", [ON_HOST, ON_DEVICE, ON_DEVICE._replace(behind_ns=None)], ids=["host", "device", "?"]
)
def test_the_steps_of_very_many_ranks_are_the_same_when_they_are_read_again(
    each: StepFacts,
) -> None:
    facts = [each._replace(took_ns=each.took_ns + rank) for rank in range(MANY)]

    found = kept(facts)

    assert found is not facts
    assert list(found) == facts
    assert [found[rank] for rank in (0, 9, MANY - 1)] == [facts[0], facts[9], facts[-1]]
    assert len(found) == MANY


@pytest.mark.parametrize(
    "odd",
    [ON_DEVICE, ON_HOST._replace(work=1 << 70)],
    ids=["on the device's clock", "beyond 64 bits"],
)
@pytest.mark.parametrize("first", [True, False])
def test_steps_that_are_not_all_of_one_kind_are_kept_as_they_are(
    odd: StepFacts, first: bool
) -> None:
    facts = [ON_HOST] * MANY
    facts[0 if first else -1] = odd

    assert kept(facts) == facts


def test_a_late_rank_among_very_many_is_named_and_compared_once_a_stride() -> None:
    job = Job(MANY, world_size=MANY)

    changes = job.steps(limits.FIRST_STEPS + limits.LENGTHS[0], late={9: {"backward": 0.03}})

    ((verdict, opened),) = changes
    assert (verdict.labels, verdict.phase, opened) == (labels_of(9), "backward", True)
    before = job.report()
    assert before.ranks[9].excess["backward"] == pytest.approx(
        0.03 / verdict.evidence["step_s"], 0.05
    )
    job.steps(limits.STRIDE - 1)
    assert job.report().ranks is before.ranks
    job.steps(1)
    assert job.report().ranks is not before.ranks
