"""Steps of very many ranks: what is kept of them, and who is late among them."""

from __future__ import annotations

from array import array

import pytest

from make import labels_of, step_facts
from otel_ddp.diagnosis.step_facts import columns_of
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.window import Compared
from ranks import Job

MANY = limits.MANY_RANKS
ON_HOST = step_facts(7, 10**18, {"data": 1, "forward": 5, "comm_wait": 2}, work=512)


@pytest.mark.parametrize(
    "work", [512, 1 << 40, 1 << 70], ids=["usual", "beyond 32 bits", "beyond 64 bits"]
)
def test_the_step_of_very_many_ranks_takes_little_memory_and_loses_nothing(work: int) -> None:
    facts = [ON_HOST._replace(wait_ns=rank) for rank in range(MANY - 1)]
    facts.append(ON_HOST._replace(work=work))

    step = Compared.of(7, columns_of(facts), (), 1, 0.0)

    assert isinstance(step.waits_ns, array)
    assert list(step.waits_ns) == [each.wait_ns for each in facts]
    assert list(step.amounts) == [each.work for each in facts]
    assert list(zip(*step.phases_ns, strict=True)) == [each.phases_ns for each in facts]
    assert step.paced_ns is None


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
