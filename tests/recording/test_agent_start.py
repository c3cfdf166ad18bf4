"""How long a training process waits for its agent."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from otel_ddp.journal.place import Place
from otel_ddp.journal.writer import JournalWriter, Shape
from otel_ddp.recording import agent_start


def test_an_end_waits_a_quarter_of_a_second_at_most_for_an_agent_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(
        agent_start, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    journal = JournalWriter(tmp_path, 128 * 1024, {"run": "r"})
    journal.scalars(Shape((1,)), 1, 1, math.nan, (0.5,))

    assert not agent_start.wait_for_agent(Place(tmp_path), journal)
    assert clock[0] - 100 == pytest.approx(0.25, abs=0.01)
    journal.close()
