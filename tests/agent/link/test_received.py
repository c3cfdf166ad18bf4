"""A process of another node, by the bytes that came of it: as it is there, whatever else comes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fed import ReadRank
from otel_ddp.agent.judge.answers import content_of, evidence_of
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.following import Outflow
from otel_ddp.agent.link.leading import _Node
from otel_ddp.agent.link.messages import _MOST_MEMBERS
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.stall.evidence import Collective, Evidence, Frame, Group
from otel_ddp.journal import layout
from otel_ddp.vocabulary import catalog


class Told:
    """A rank, and the same as the lead sees it, from the same clocks."""

    def __init__(self, folder: Path) -> None:
        self.rank = ReadRank(folder, 3, "node-1", world_size=4)
        self.outflow: Outflow | None = None
        self.node = _Node("node-1")
        # What is added to a monotonic time: the process began at one moment by either clock.
        reader = self.rank.process.reader
        self.ahead_ns = reader.created_ns - reader.created_monotonic_ns

    def message(self) -> Any:
        """What is new of it, as it comes over the link."""
        self.rank.poll()
        if self.outflow is None:
            self.outflow = Outflow(1, self.rank.process, is_kept=False)
        now_ns, message = time.monotonic_ns(), wire.Process()
        self.outflow.write(message, now_ns, 1 << 20)
        return wire.Process.FromString(message.SerializeToString())

    def take(self, *messages: Any, ahead_ns: int | None = None) -> Process:
        offset_ns = self.ahead_ns if ahead_ns is None else ahead_ns
        report = wire.Report(clock_offset_ns=offset_ns, processes=messages)
        now_ns = time.monotonic_ns()
        self.node.hear(report, now_ns)
        hosts = list(self.node.feed(report, now_ns, {}))
        for each in hosts:
            each.poll(time.time_ns())
        return hosts[0].process if hosts else self.rank.process

    def close(self) -> None:
        if self.outflow is not None:
            self.outflow.journal.close()
        self.rank.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path / "there")
    yield made
    made.close()


def write(rank: ReadRank) -> None:
    """A journal with something of all that a judge reads, and of what it does not."""
    facts = {"capability": {"comm_wait": "", "device_clock": "none"}, "own_collectives": ["other"]}
    rank.writer.document(layout.FACTS, {**facts, "backend": "cuda:nccl"})
    rank.writer.document(layout.CONFIG, {"lr": 0.1})
    rank.state("running")
    for number in range(1, 40):
        rank.step({"forward": 5.0 + number, "backward": 7.0, "comm_wait": 3.0}, number)
        rank.log({"loss": 1.0 / number}, number)
        rank.writer.append(layout.EVENT, b'{"body": "saved"}')
    rank.log({"loss": math.nan}, 40)
    rank.log({"loss": math.inf}, 41)
    rank.enter("backward")
    rank.writer.add(rank.writer.counter(catalog.TRAINING_STEPS.name), 39.0)
    rank.writer.words[layout.IN_MARK // 8] = 1


def test_all_that_a_judge_reads_is_the_same_on_the_other_node(told: Told) -> None:
    write(told.rank)
    here, there = told.rank, told.take(told.message())
    now_ns = time.time_ns()

    assert there.new.steps == here.process.new.steps != []
    assert there.new.device_steps == here.process.new.device_steps
    assert there.state() == here.process.state()
    assert there.labels == here.process.labels
    assert there.position(told.ahead_ns) == here.process.position(told.ahead_ns)
    shown = [replace(each.describe(), seen_alive_ns=0) for each in (there, here.process)]
    assert shown[0] == shown[1]
    (value,), (there_value,) = here.process.nonfinite(now_ns), there.nonfinite(now_ns)
    assert math.isnan(there_value.value)
    assert abs(there_value.time_ns - value.time_ns) < 1e9
    assert there_value._replace(value=0.0, time_ns=0) == value._replace(value=0.0, time_ns=0)
    # Neither values nor events, nor a configuration.
    assert (there.new.scalars, there.new.events, there.reader.config) == ([], [], {})


def test_times_follow_the_clock_offset_that_was_measured_last(told: Told) -> None:
    told.take(told.message(), ahead_ns=told.ahead_ns - 60 * 10**9)
    write(told.rank)
    there = told.take(told.message())

    assert there.new.steps == told.rank.process.new.steps != []


def test_the_end_is_the_same_on_the_other_node(told: Told) -> None:
    write(told.rank)
    told.take(told.message())
    told.rank.writer.reason("ValueError: no")
    told.rank.state("failed")
    told.rank.alive = False
    there = told.take(told.message())

    here, ended = told.rank.process.end(), there.end()

    assert not there.is_at_work
    assert (ended.state, ended.reason) == ("failed", "ValueError: no")
    moments = {"seen_alive_ns": 0, "ended_ns": 0}
    assert ended._replace(**moments) == here._replace(**moments)
    assert abs(ended.ended_ns - here.ended_ns) < 1e9


@pytest.mark.parametrize(
    "damage",
    [
        {"head": bytes(200)},
        {"known": b"{"},
        {"known": b'{"end": 7}'},
        {"known": b'{"nonfinite": [["loss"]]}'},
    ],
)
def test_a_report_that_makes_no_sense_costs_itself_alone(
    told: Told, damage: dict[str, bytes]
) -> None:
    write(told.rank)
    good = told.message()
    wrong = wire.Process.FromString(good.SerializeToString())
    for field, content in damage.items():
        setattr(wrong, field, content)

    told.take(wrong)
    there = told.take(good)

    assert there.state() == told.rank.process.state()


text = st.text(st.characters(codec="utf-8"), max_size=9)
whole = st.integers(0, 2**53)
EVIDENCE = st.builds(
    Evidence,
    silent_s=st.none(),
    answered=st.just(True),
    kind=st.sampled_from(["where", "what"]),
    answered_ns=whole,
    groups=st.lists(
        st.builds(Group, text, whole, whole, st.none() | whole, text, text, st.none() | whole)
    ).map(tuple),
    collectives=st.lists(st.builds(Collective, text, whole, text, text, text)).map(tuple),
    stack=st.lists(st.builds(Frame, text, st.none() | whole, text)).map(tuple),
    device_phase=st.sampled_from(["", "forward", "comm_wait"]),
    device_step=st.none() | whole,
    kernel=st.none(),
)


@settings(max_examples=20, deadline=None)
@given(EVIDENCE)
def test_an_answer_is_the_same_on_the_other_node(evidence: Evidence) -> None:
    content = content_of(evidence, _MOST_MEMBERS)

    assert evidence_of(content, evidence.answered_ns) == evidence
