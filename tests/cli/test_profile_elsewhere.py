"""A rank of another node that is profiled, as the agent here tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_ddp.cli.node.profile.choice import Candidate
from otel_ddp.cli.node.profile.elsewhere import WindowElsewhere
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState

TOLD = {
    "ranks": [
        {"rank": 13, "steps": 5, "first_step": 81, "step_s": 0.03, "file": "rank-13.json.gz"}
    ],
    "folder": "/profiles/a",
    "table": [
        {"operator": "aten::mm", "on_device": False, "times_s": [0.01]},
        {"operator": "gemm", "on_device": True, "times_s": [0.02]},
    ],
}


class Agent:
    """Answers in this order, and remembers what it was asked."""

    def __init__(self, *answers: Mapping[str, Any] | str) -> None:
        self._answers = iter(answers)
        self.asked: list[dict[str, str]] = []

    def __call__(self, **query: str) -> Mapping[str, Any] | str:
        self.asked.append(query)
        return next(self._answers)


@pytest.fixture
def rank(tmp_path: Path) -> Candidate:
    of: Any = {"group": "g", "run": "a run", "rank": 13, "node": "node-1", "journal": "13.journal"}
    return Candidate(Place(tmp_path), ProcessState(**of))


def ended(window: WindowElsewhere) -> WindowElsewhere:
    window.ask(5, 120.0)
    for _ in iter(lambda: window.is_over, True):
        window.poll()
    return window


def test_its_table_comes_here_and_its_trace_stays_there(rank: Candidate) -> None:
    agent = Agent({"number": 7}, {}, TOLD)

    window = ended(WindowElsewhere(rank, agent))

    assert agent.asked == [
        {"group": "g", "run": "a run", "rank": "13", "steps": "5"},
        {"number": "7"},
        {"number": "7"},
    ]
    assert rank.label == "rank 13 (node-1)"
    assert (window.state, window.steps, window.first_step) == ("written", 5, 81)
    totals = window.totals()
    assert totals.step_s == 0.03
    assert totals.own == {("aten::mm", False): 0.01, ("gemm", True): 0.02}
    assert window.keep() == "/profiles/a/rank-13.json.gz"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (["no agent runs"], "no agent runs"),
        ([{"why": "its node is not heard"}], "its node is not heard"),
        ([{}], "no answer"),
        ([{"number": 7}, {"why": "it ended"}], "it ended"),
        ([{"number": 7}, "the agent does not answer"], "the agent does not answer"),
        ([{"number": 7}, {"ranks": 3}], "its node answers what makes no sense"),
        ([{"number": 7}, {"threads": []}], "its node answers what makes no sense"),
    ],
)
def test_without_a_table_it_says_why(
    rank: Candidate, answers: list[Mapping[str, Any] | str], why: str
) -> None:
    window = ended(WindowElsewhere(rank, Agent(*answers)))

    assert window.state == "refused"
    assert window.why.startswith(why)


@pytest.mark.parametrize("times_s", [None, [], ["x"], [float("nan")], [{}]])
def test_a_table_without_times_is_an_error_and_no_zero(rank: Candidate, times_s: Any) -> None:
    told = {**TOLD, "table": [{"operator": "aten::mm", "on_device": False, "times_s": times_s}]}
    window = ended(WindowElsewhere(rank, Agent({"number": 7}, told)))

    with pytest.raises(ValueError, match="a row without a time"):
        window.totals()
