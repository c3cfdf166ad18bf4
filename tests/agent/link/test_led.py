"""A run that another agent leads: what is said here, and what once that agent is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.link.two_agents import RUN, TwoAgents
from otel_ddp.agent.judge.reports import Judgement
from otel_ddp.agent.link import leading as leading_module
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link import messages
from otel_ddp.agent.link.messages import Senseless
from otel_ddp.diagnosis.stall.evidence import Evidence, Kernel
from otel_ddp.diagnosis.straggler.finding import Report


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[TwoAgents]:
    made = TwoAgents(tmp_path)
    yield made
    made.close()


# An agent may have another name than its node.
@pytest.mark.parametrize("agent", ["node-1", "host-1"])
def test_both_agents_show_what_the_lead_finds_and_each_exports_its_own_ranks(
    agents: TwoAgents, agent: str
) -> None:
    agents.cable.node = agent
    agents.train(250, late=3)

    assert (agents.lead.late(), agents.led.late()) == (["3"], ["3"])
    assert agents.led.sentence() == agents.lead.sentence()
    assert agents.lead.named() == {}
    assert agents.led.named() == {"3": 1.0}
    # The lead alone makes a record of it.
    assert "straggler" in agents.lead.reported()
    assert agents.led.reported() == set()


def test_an_agent_whose_lead_is_silent_begins_to_judge_and_reports_what_it_finds(
    agents: TwoAgents,
) -> None:
    agents.train(250, late=-1)
    agents.cable.is_cut = True
    agents.train(250, late=3)
    assert agents.led.reported() == set()

    agents.train(250, late=3)

    # It is two ranks here, and the sentence is that of this node alone.
    assert agents.led.late() == ["3"]
    assert agents.led.named() == {"3": 1.0}
    assert "straggler" in agents.led.reported()
    assert "here, by the ranks of this node alone" in agents.following.describe()
    agents.cable.is_cut = False
    agents.train(100, late=-1)
    assert agents.led.records() == [("straggler", "closed")]


def test_a_verdict_is_told_once_however_often_the_link_breaks(agents: TwoAgents) -> None:
    agents.train(250, late=3)
    for _ in range(2):
        agents.cable.is_cut = True
        agents.train(25 * 18, late=3)
        assert "is judged here" in agents.following.describe()
        assert agents.led.late() == ["3"]
        agents.cable.is_cut = False
        agents.train(25 * 12, late=3)

    assert "straggler" not in agents.led.reported()
    assert "straggler" not in [each["kind"] for each in agents.led.judge.past()]


@pytest.mark.parametrize("told", [True, False])
def test_a_death_is_told_here_once_the_lead_is_gone_unless_the_lead_has_told_it(
    agents: TwoAgents, told: bool
) -> None:
    agents.train(50, late=-1)
    agents.cable.is_cut = not told
    agents.led.ranks[1].alive = False
    agents.poll(5)
    assert len(agents.led.of_kind("death")) == told

    agents.cable.is_cut = True
    agents.poll(15)

    assert "is judged here" in agents.following.describe()
    assert len(agents.led.of_kind("death")) == 1
    assert ("death" in agents.led.reported()) is not told


def test_a_node_whose_link_is_cut_is_shown_as_silent_then_left_out_and_comes_back(
    agents: TwoAgents,
) -> None:
    agents.train(250, late=3)
    assert {each.describe().state for each in agents.leading.sources()} == {"running"}
    heard_ns = agents.lead.now_ns
    agents.cable.is_cut = True
    agents.train(25 * 7, late=3)
    shown = [each.describe() for each in agents.leading.sources()]
    assert [(each.state, each.phase_since_ns) for each in shown] == [("not heard", heard_ns)] * 2
    agents.train(25 * 15, late=3)

    assert all(each.is_left_out for each in agents.leading.sources())
    assert agents.lead.judge.insufficient()
    assert "node-1 not heard for" in agents.leading.describe()
    agents.cable.is_cut = False
    agents.train(250, late=3)

    assert (agents.lead.late(), agents.led.late()) == (["3"], ["3"])
    assert "is judged by the agent of node-0: connected; " in agents.following.describe()
    assert {each.describe().state for each in agents.leading.sources()} == {"running"}


def test_a_node_that_was_left_out_is_missed_once_the_others_wait_for_it(agents: TwoAgents) -> None:
    agents.train(250, late=-1)
    agents.cable.is_cut = True
    agents.train(25 * 30, late=-1)
    assert all(each.is_left_out for each in agents.leading.sources())
    assert agents.lead.of_kind("silence") == []

    for each in agents.lead.ranks:
        each.enter("comm_wait")
    agents.poll(7)

    (missed,) = agents.lead.of_kind("silence")
    assert missed["who"]["node"] == "node-1"
    assert missed["evidence"]["unheard_s"] > 30


def test_whatever_a_lead_asks_each_process_is_asked_once_a_second(
    agents: TwoAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.train(25, late=-1)
    asked: list[Any] = []
    for rank in agents.led.ranks:
        monkeypatch.setattr(rank.process.host, "ask", lambda *question: asked.append(question))
    flood = [wire.Question(process=1, asked=each) for each in ("where", "no", "what") * 1000]
    agents.cable.answers += [wire.Answer(questions=flood)] * 2

    agents.following.poll(agents.led.read(), agents.led.now_ns)

    assert [question for question, _ in asked] == ["where", "what"]


def test_a_person_is_told_why_a_rank_of_another_node_does_not_answer(
    agents: TwoAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_module, "_ANSWERED_WITHIN_S", 0.02)
    agents.train(25, late=-1)
    assert [each["why"] for each in agents.leading.ask_stacks(3)] == [
        "the agent of node-1 has not answered"
    ]
    silent = Evidence(silent_s=1.0, kernel=Kernel("T", True, 0.0))
    monkeypatch.setattr(agents.led.ranks[1].process.host, "evidence", lambda _: silent)
    agents.poll(3)

    assert [each["why"] for each in agents.leading.ask_stacks(3)] == [
        "it cannot answer: it is stopped by a signal"
    ]


def test_the_death_of_a_rank_is_told_also_when_its_journal_is_gone(agents: TwoAgents) -> None:
    agents.train(50, late=3)
    steps = sum(len(each.new.steps) for each in agents.leading.sources())
    agents.led.ranks[1].alive = False
    agents.poll()
    agents.led.seen.pop()
    agents.poll()
    agents.poll()

    kinds = {each["kind"]: each["who"].get("rank") for each in agents.led.judge.verdicts()}
    assert kinds == {"death": "3"}
    assert "rank 3 (node-1) was killed" in agents.lead.sentence()
    # No step comes twice, and the other rank goes on.
    ended, going = sorted(agents.leading.sources(), key=lambda each: each.is_at_work)
    assert (steps, len(ended.new.steps), going.is_at_work) == (50, 0, True)


@pytest.mark.parametrize(
    ("uncertainty_ns", "told"),
    [(0, "rank 3 (node-1) was killed"), (1_000_000_000, "which was first is not known")],
)
def test_of_two_deaths_none_is_the_first_by_clocks_that_are_not_known_well(
    uncertainty_ns: int, told: str, agents: TwoAgents
) -> None:
    agents.cable.clock_uncertainty_ns = uncertainty_ns
    agents.train(50, late=-1)
    agents.led.ranks[1].alive = False
    agents.poll()
    agents.lead.ranks[0].alive = False
    agents.poll(12)

    (death,) = agents.lead.of_kind("death")
    assert told in death["sentence"]


def steps_seen(agents: TwoAgents, rounds: int) -> list[int | None]:
    """The numbers of the steps of rank 3 that the lead is told in so many seconds, as they come."""
    found: list[int | None] = []
    for _ in range(rounds):
        agents.train(25, late=-1)
        found += [
            step.number
            for each in agents.leading.sources()
            if dict(each.labels)["rank"] == "3"
            for step in each.new.steps
        ]
    return found


def test_what_got_lost_on_the_way_is_asked_for_and_no_step_comes_twice(agents: TwoAgents) -> None:
    found = steps_seen(agents, 2)
    agents.cable.is_cut = True
    found += steps_seen(agents, 3)
    # The lead was too busy to take these.
    agents.cable.reports.clear()
    agents.cable.is_cut = False

    found += steps_seen(agents, 4)

    assert found == [*range(1, 25 * 9 + 1)]
    assert sum(each.reader.lost for each in agents.leading.sources()) == 0


def test_an_agent_that_ends_reports_what_it_has_read_last(agents: TwoAgents) -> None:
    agents.train(25, late=-1)
    for rank in agents.led.ranks:
        rank.step({"forward": 20.0}, 26)
        rank.poll()

    agents.following.stop()

    agents.leading.poll([], agents.lead.now_ns)
    found = [[step.number for step in each.new.steps] for each in agents.leading.sources()]
    assert found == [[26], [26]]


def test_a_follower_hears_of_its_own_ranks_alone(agents: TwoAgents) -> None:
    agents.train(250, late=3)
    judgement = agents.lead.judge.judgement(RUN, "node-0")
    assert judgement is not None
    waits_s = {("tp", "all_reduce"): 0.012}
    ranks = tuple(each._replace(waits_s=waits_s) for each in judgement.report.ranks)
    judgement = replace(judgement, report=judgement.report._replace(ranks=ranks))
    own = [each.labels for each in agents.leading.sources()]

    there = messages.unpack_judgement(messages.PackedJudgement(judgement).to(own), RUN, own)

    assert {dict(each.labels)["rank"] for each in there.report.ranks} == {"2", "3"}
    assert set(map(repr, there.report.ranks)) < set(map(repr, ranks))
    assert there.compared == 4


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", json.dumps({"ranks": 7}).encode()])
def test_what_a_lead_says_without_sense_is_refused(content: bytes) -> None:
    with pytest.raises(Senseless):
        messages.unpack_judgement(content, RUN, [])


def test_a_lead_speaks_of_its_own_run_alone() -> None:
    verdict = {"kind": "stall", "who": {"group": "g", "run": "another"}, "evidence": {}}
    judgement = Judgement("node-0", [verdict], [verdict], Report((), ""), 0)

    found = messages.unpack_judgement(messages.PackedJudgement(judgement).to([]), RUN, [])

    assert (found.open, found.past) == ([], [])
