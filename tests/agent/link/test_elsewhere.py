"""What a person asks of processes of other nodes: numbers, answers, and answers that never come."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs.elsewhere import AskedElsewhere
from otel_ddp.agent.link.runs.pack import Senseless

SECOND_NS = 1_000_000_000
SOURCE: Any = SimpleNamespace(heard_ns=100 * SECOND_NS)


def told(number: int, content: Any) -> wire.Told:
    return wire.Told(number=number, content=json.dumps(content).encode())


def test_a_profile_is_asked_for_once_and_answered_once() -> None:
    asked = AskedElsewhere()

    number = asked.profile(SOURCE, 5)

    (question,) = asked.questions()
    assert (question.number, question.kind, question.steps) == (number, wire.Question.PROFILE, 5)
    assert list(asked.questions()) == []
    assert asked.told(number, SOURCE.heard_ns) == {}
    asked.take(told(number, {"table": []}))
    assert asked.told(number, SOURCE.heard_ns) == {"table": []}
    assert asked.told(number, SOURCE.heard_ns) is None


def test_a_node_that_is_not_heard_for_a_minute_will_not_answer() -> None:
    asked = AskedElsewhere()
    number = asked.profile(SOURCE, 5)

    assert asked.told(number, SOURCE.heard_ns + 60 * SECOND_NS) == {}
    assert asked.told(number, SOURCE.heard_ns + 61 * SECOND_NS) is None


def test_what_was_not_asked_is_not_kept_and_garbage_is_refused() -> None:
    asked = AskedElsewhere()
    number = asked.profile(SOURCE, 5)

    asked.take(told(number + 1, {"table": []}))
    with pytest.raises(Senseless):
        asked.take(told(number, ["table"]))

    assert asked.told(number + 1, SOURCE.heard_ns) is None
    assert asked.told(number, SOURCE.heard_ns) == {}


def test_sixteen_questions_are_open_at_most_and_the_newest_stay() -> None:
    asked = AskedElsewhere()

    numbers = [asked.profile(SOURCE, 1) for _ in range(20)]

    still_open = [each for each in numbers if asked.told(each, SOURCE.heard_ns) is not None]
    assert still_open == numbers[-16:]
    assert [each.number for each in asked.questions()] == numbers[-16:]
