"""What docs/internals/diagnosis.md promises, on a part of the simulated runs of its tables."""

from __future__ import annotations

import pytest
from tools import diagnosis_cases as tool
from tools import parallel_cases as parallel


@pytest.mark.parametrize(
    ("excesses", "rank_right", "soon"),
    [((0.25, 0.5), 0.98, 1.0), ((0.1, 0.15, 0.2), 0.9, 0.8)],
    ids=["above 20 %", "10 to 20 %"],
)
def test_one_late_rank(excesses: tuple[float, ...], rank_right: float, soon: float) -> None:
    cases = [case._replace(steps=tool.BEGINS + 320) for case in tool.one_late(excesses, every=16)]
    found = [(case, tool.replayed(case)) for case in cases]
    right = [each for each in found if tool.right_rank(*each)]
    steps = [named.step for _, each in right for named in each.named.values()]

    assert len(cases) >= 14
    assert len(right) >= rank_right * len(cases)
    assert sum(tool.right_phase(*each) for each in right) >= 0.95 * len(right)
    assert sum(step <= 120 for step in steps) >= soon * len(steps)


def test_late_nodes_are_named_as_nodes_and_a_late_rank_beside_them_as_a_rank() -> None:
    cases = [*tool.nodes_late((0.2,), every=45), *tool.one_late_among_nodes((0.3,), every=60)]
    found = [(case, tool.replayed(case)) for case in cases]

    assert len(cases) >= 7
    assert all(tool.right_rank(*each) and tool.right_phase(*each) for each in found)


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.stress)])
def test_balanced_steps_lead_to_no_verdict(steps: int) -> None:
    # Chance has the freest hand where there are few; more ranks take longer, and are in the table.
    assert tool.false_verdicts(steps, ranks=(2, 3)) == 0
    assert tool.false_verdicts(6_000, ranks=(2, 3), own=True) == 0
    assert tool.false_verdicts(4_000, ranks=(2,), nodes=(2, 3)) == 0


by_kind = pytest.mark.parametrize("kind", parallel.KINDS, ids=lambda kind: str(kind.title))


@by_kind
def test_the_late_rank_is_named_with_the_calls_in_which_others_wait_for_it(
    kind: parallel.Kind,
) -> None:
    of_phase = {
        case.phase: case._replace(steps=parallel.BEGINS + 110) for case in parallel.late(kind, 0.2)
    }
    found = [(case, parallel.replayed(case)) for case in of_phase.values()]

    assert set(of_phase) == {"forward", "backward"}
    for case, each in found:
        assert parallel.is_right(case, each), each
        named = each.named[case.late]
        assert named.phase == case.phase
        assert named.waits_in.startswith(kind.where[case.phase])


@by_kind
def test_balanced_steps_lead_to_no_verdict_on_a_rank(kind: parallel.Kind) -> None:
    found = [
        parallel.replayed(case) for case in parallel.balanced(kind, 4 * len(kind.ranks) * 200)[::2]
    ]

    assert [each.named for each in found] == [{}] * len(found)
    assert [each.insufficient for each in found] == [""] * len(found)
