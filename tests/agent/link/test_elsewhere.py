"""The stacks of processes on other nodes: who asks, and what is no answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from node import until
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.known import Senseless
from otel_ddp.agent.link.stacks import AskedElsewhere


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
