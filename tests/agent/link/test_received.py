"""A process of another node, by the bytes that came of it: as it is there, whatever else comes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
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
        ahead_ns = self.ahead_ns if ahead_ns is None else ahead_ns
        report = wire.Report(clock_offset_ns=ahead_ns, processes=messages)
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
    package=text,
    kernel=st.none(),
)


@settings(max_examples=20, deadline=None)
@given(EVIDENCE)
def test_an_answer_is_the_same_on_the_other_node(evidence: Evidence) -> None:
    content = content_of(evidence, _MOST_MEMBERS)

    assert evidence_of(content, evidence.answered_ns) == evidence


DAMAGE = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)))
ODD_NONFINITE = ((10**400, 1), (3.5, 1), ("nan", 10**30))
# Of kinds that nobody sends.
WRONG = (
    *({"end": {"state": []}}, {"end": 7}, {"memory": ["a", True]}, {"nonfinite": [[], [1] * 6, 3]}),
    *({"nonfinite": [["loss", "", value, 1, at, None]]} for value, at in ODD_NONFINITE),
    {"answer": {"groups": [7], "threads": {}}, "answered_ns": 5, "kernel": [[], 1, {}, []]},
    {"answer": 7, "answered_ns": 2**70, "silent_s": "x", "cause": [], "present_ns": "x"},
    {"node": ["n"], "step": {}, "end": {"state": "killed", "gone_ns": "x"}, "cause": {"xid": 7}},
)
FIELDS = ("head", "progress", "totals", "reason", "known")


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_foreign_bytes_never_raise_and_cost_no_more_than_they_are(told: Told, data: Any) -> None:
    if told.outflow is None:
        write(told.rank)
        told.good = told.message()  # type: ignore[attr-defined]
    message = wire.Process.FromString(told.good.SerializeToString())  # type: ignore[attr-defined]
    for field in data.draw(st.lists(st.sampled_from([*FIELDS, "definitions", "records"]))):
        stretch = getattr(message, field) if field in ("definitions", "records") else None
        content = bytearray(getattr(message, field) if stretch is None else stretch.content[0])
        for at, put in data.draw(DAMAGE):
            first = int(at * len(content))
            content[first : first + len(put)] = put
        if stretch is None:
            setattr(message, field, bytes(content))
        else:
            stretch.content[0] = bytes(content)
            stretch.since = data.draw(st.sampled_from([0, 8, 2**63, 2**64 - 1]))
            stretch.until = data.draw(st.sampled_from([0, 8, 2**63, 2**64 - 1]))
            stretch.at[0] = data.draw(st.sampled_from([stretch.at[0], 3, 2**64 - 1]))
    message.id = data.draw(st.integers(1, 3))
    if wrong := data.draw(st.none() | st.sampled_from(WRONG)):
        message.known = json.dumps(wrong).encode()

    ahead_ns = data.draw(st.sampled_from([told.ahead_ns, 0, 2**63 - 1, -(2**63)]))

    there = told.take(message, message, ahead_ns=ahead_ns)

    there.state(), there.position(0), there.describe()
    there.host.evidence(0), there.end()
    for value in there.nonfinite(0):
        assert not math.isfinite(value.value)
        assert abs(value.time_ns) <= 2**62
    assert 0 <= there.began_ns < 2**62
    assert len(told.node.hosts) <= 3
    for host in told.node.hosts.values():
        assert sum(map(len, host.reader.content.known.values())) < 4096


@pytest.mark.parametrize("part", ["definitions", "records"])
def test_places_that_no_journal_has_cost_the_report_alone(told: Told, part: str) -> None:
    write(told.rank)
    good = told.message()
    wrong = wire.Process.FromString(good.SerializeToString())
    stretch = getattr(wrong, part)
    stretch.until = stretch.at[-1] = 2**64 - 8

    told.take(wrong, wire.Process(id=1, definitions=wire.Stretch(since=2**62)))
    there = told.take(good)

    assert there.state() == told.rank.process.state()
    [host] = told.node.hosts.values()
    assert max(host.reader.position, host.reader.defined) < 2**62
