"""Stacks that the lead asks for: what the agent of the process answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_ddp.agent.link import limits
from otel_ddp.agent.link.stacks import StacksHere


class Answered:
    """A process that has answered with so many frames."""

    def __init__(self, frames: int) -> None:
        self._frames = frames

    def is_done(self) -> bool:
        return True

    def to_json(self) -> dict[str, Any]:
        frame = {"function": "f" * 200, "file": "train.py", "line": 7}
        return {"why": "", "threads": [{"name": "main", "frames": [frame] * self._frames}]}


@pytest.mark.parametrize(("frames", "fits"), [(64, True), (6400, False)])
def test_an_answer_that_is_too_large_for_the_link_says_so(frames: int, fits: bool) -> None:
    process: Any = Answered(frames)
    stacks = StacksHere(lambda journals: [process])
    stacks.ask(7, Path("a.journal"))

    assert stacks.poll()

    (told,) = stacks.take()
    content = json.loads(told.content)
    assert told.number == 7
    assert (content == process.to_json()) == fits
    assert ("too large" in content["why"]) != fits


def test_answers_of_many_go_with_several_reports_as_one_has_a_limit() -> None:
    process: Any = Answered(1800)
    stacks = StacksHere(lambda journals: [process])
    for number in range(5):
        stacks.ask(number, Path("a.journal"))

    reports = []
    while stacks.poll():
        reports.append(stacks.take())

    assert [each.number for told in reports for each in told] == [0, 1, 2, 3, 4]
    sizes = [sum(len(each.content) for each in told) for told in reports]
    assert max(sizes) <= limits.MOST_TOLD_BYTES
    assert len(sizes) == 3
