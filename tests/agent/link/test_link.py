"""A lead and its followers over TLS on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.link import linked
from agent.link.linked import Links, until
from otel_ddp.agent.link.link_pb2 import Answer, Process, Question, Report


@pytest.fixture
def links() -> Iterator[Links]:
    with linked.links() as made:
        yield made


def test_reports_reach_the_lead_in_order_and_answers_come_back(links: Links) -> None:
    lead, follower = links.lead(), links.follower()
    taken = []

    for number in (11, 12, 13):
        follower.send(Report(processes=[Process(id=number)]))
    until(lambda: taken.extend(lead.take()) or len(taken) == 3)
    lead.answer("node-1", Answer(questions=[Question(process=12, kind=Question.WHERE)]))
    (answer,) = until(follower.take)

    assert [(node, report.processes[0].id) for node, report in taken] == [
        ("node-1", 11),
        ("node-1", 12),
        ("node-1", 13),
    ]
    assert [(each.process, each.kind) for each in answer.questions] == [(12, Question.WHERE)]
    assert follower.state.startswith(f"connected to node-0 (127.0.0.1:{links.port}) since ")
    assert lead.nodes()["node-1"].connected


def test_an_answer_without_a_question_goes_with_the_next_report(links: Links) -> None:
    lead, follower = links.lead(), links.follower()
    until(lambda: lead.nodes())

    lead.answer("node-1", Answer(judged=b"late"))
    follower.send(Report())

    assert [each.judged for each in until(follower.take)] == [b"late"]
