"""What docs/internals/diagnosis.md promises for each way of being parallel, on a part."""

from __future__ import annotations

import pytest
from tools import parallel_cases as tool

by_kind = pytest.mark.parametrize("kind", tool.KINDS, ids=lambda kind: str(kind.title))


@by_kind
def test_the_late_rank_is_named_with_the_calls_in_which_others_wait_for_it(kind: tool.Kind) -> None:
    of_phase = {case.phase: case._replace(steps=tool.BEGINS + 110) for case in tool.late(kind, 0.2)}
    found = [(case, tool.replayed(case)) for case in of_phase.values()]

    assert set(of_phase) == {"forward", "backward"}
    for case, each in found:
        assert tool.is_right(case, each), each
        named = each.named[case.late]
        assert named.phase == case.phase
        assert named.waits_in.startswith(kind.where[case.phase])


@by_kind
def test_balanced_steps_lead_to_no_verdict_on_a_rank(kind: tool.Kind) -> None:
    found = [tool.replayed(case) for case in tool.balanced(kind, 4 * len(kind.ranks) * 200)[::2]]

    assert [each.named for each in found] == [{}] * len(found)
    assert [each.insufficient for each in found] == [""] * len(found)
