"""When a phase is reported to have collectives of the program's own, and when no longer."""

from __future__ import annotations

import pytest

from otel_ddp.torch.readings import own_collectives
from otel_ddp.torch.readings.own_collectives import OwnCollectives


def test_the_answer_about_a_phase_is_stable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = 0
    monkeypatch.setattr(own_collectives, "_counts", lambda: {1: counted})
    found = OwnCollectives()

    def looked(*, busy: bool) -> list[str]:
        nonlocal counted
        found.begin([])
        counted += busy
        found.phase_ended("other")
        return found.end()

    # Every other step, then none any more.
    assert [looked(busy=not number % 2) for number in range(6)] == [["other"]] * 6
    assert [looked(busy=False) for _ in range(6)] == [["other"]] * 6
    assert looked(busy=False) == []


def test_one_step_of_many_is_not_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0
    monkeypatch.setattr(own_collectives, "_counts", lambda: {1: counted})
    found = OwnCollectives()
    for busy in (False, False, True, False):
        found.begin([])
        counted += busy
        found.phase_ended("data")
        assert found.end() == []
