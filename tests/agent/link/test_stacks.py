"""Stacks of processes on other nodes: who asks, what is answered, and what is no answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node import until
from otel_ddp.agent.link import limits
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.known import Senseless
from otel_ddp.agent.link.stacks import AskedElsewhere, StacksHere


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


def told(number: int, content: Any) -> wire.Told:
    return wire.Told(number=number, content=json.dumps(content).encode())


def test_many_ask_at_once_and_the_newest_sixteen_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("otel_ddp.agent.link.stacks.ANSWER_S", -4.0)
    asked = AskedElsewhere()
    processes: list[Any] = [SimpleNamespace(name=n) for n in range(20)]
    for process in processes:
        assert asked.stacks(process) == {}

    new = list(asked.questions())

    assert [each.process for each in new] == processes[-16:]
    assert list(asked.questions()) == []


def test_an_answer_goes_to_who_has_asked_and_garbage_is_refused() -> None:
    asked = AskedElsewhere()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked.stacks, SimpleNamespace())
        (question,) = until(lambda: list(asked.questions()), "the question")

        asked.take(told(question.number + 1, {"stacks": "another's"}))
        with pytest.raises(Senseless):
            asked.take(told(question.number, ["stacks"]))
        asked.take(told(question.number, {"stacks": "here"}))

        assert answer.result(60) == {"stacks": "here"}
