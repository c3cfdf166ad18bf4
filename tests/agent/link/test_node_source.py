"""A process of another node, told over the link: the judge finds what it would find beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from make import MS, WrittenRank, labels_of
from node import without_figures
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.link.runs.node_source import NodeSource
from otel_ddp.agent.link.runs.process_report import ProcessReport
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.steps import Parts, Step
from otel_ddp.agent.verdicts.journal_source import JournalSources
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Memory, NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import (
    Collective,
    Evidence,
    Frame,
    Group,
    Kernel,
    Position,
)
from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STATES

AHEAD_NS = 3_000_000_000
"""The clock of the other node is behind the lead's by so much."""

# -- nothing is lost on the way

whole = st.integers(0, 2**53)
moment = st.integers(10**18, 2 * 10**18)
text = st.text(st.characters(codec="utf-8"), max_size=20)
maybe = st.none() | whole
phase = st.sampled_from(["data", "forward", "backward", "comm_wait", "other"])


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Steps that follow one another, of few kinds."""
    kinds = draw(st.lists(st.tuples(st.binary(max_size=6), st.booleans()), min_size=1, max_size=3))
    found, until_ns = [], draw(moment)
    for _ in range(draw(st.integers(0, 12))):
        codes, rests = draw(st.sampled_from(kinds))
        spans = tuple(draw(st.integers(0, 10**10)) for _ in codes)
        rest = ((3, draw(whole)),) if rests else ()
        began_ns = until_ns + draw(st.sampled_from([0, 0, 5, -7]))
        until_ns = began_ns + sum(spans) + sum(ns for _, ns in rest)
        found.append(
            Step(
                *(draw(maybe), began_ns, until_ns, Parts(began_ns, codes, spans), rest),
                gc_s=draw(st.sampled_from([0.0, 0.0123, 1.5])),
                skipped=draw(st.booleans()),
                retries=0,
                work=draw(st.sampled_from([0, 4096])),
                paced=tuple(draw(st.lists(whole, max_size=2))),
                lag_ns=draw(st.none() | st.integers(-(10**9), 10**9)),
                profiled=draw(st.booleans()),
            )
        )
    return found


def sent(message: Any) -> Any:
    """The same on the other node."""
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=200, deadline=None)
@given(steps())
def test_steps_are_the_same_on_the_other_node(given_steps: list[Step]) -> None:
    process = wire.Process()
    pack.pack_steps(process.steps, given_steps)
    pack.pack_device_steps(process.device_steps, given_steps)
    process = sent(process)

    host, device = (
        pack.unpack_steps(each, AHEAD_NS) for each in (process.steps, process.device_steps)
    )

    later = [
        each._replace(
            began_ns=each.began_ns + AHEAD_NS,
            ended_ns=each.ended_ns + AHEAD_NS,
            parts=each.parts._replace(began_ns=each.began_ns + AHEAD_NS),
        )
        for each in given_steps
    ]
    assert device == later
    assert host == [each._replace(paced=(), lag_ns=None) for each in later]


frames = st.builds(Frame, text, maybe, text)
groups = st.builds(Group, text, whole, maybe, maybe, text, text)
collectives = st.builds(Collective, text, whole, text, text, text)
kernels = st.builds(Kernel, text, st.booleans(), st.none() | st.floats(0, 1), text)
evidence = st.builds(
    Evidence,
    silent_s=st.none() | st.floats(0, 100),
    answered=st.just(True),
    kind=st.sampled_from(["where", "what"]),
    answered_ns=moment,
    groups=st.lists(groups, max_size=2).map(tuple),
    collectives=st.lists(collectives, max_size=2).map(tuple),
    stack=st.lists(frames, max_size=3).map(tuple),
    device_phase=text,
    device_step=maybe,
    package=text,
    kernel=st.none() | kernels,
)
states = st.builds(
    RankState,
    st.just(labels_of(3)),
    own_world_size=maybe,
    waits_known=st.none() | st.booleans(),
    own_collectives=st.lists(phase, max_size=2).map(tuple),
    device_clock=st.none() | st.booleans(),
    under_nccl=st.booleans(),
    began_ns=moment,
    clock_shift_ns=st.integers(-(10**18), 10**18),
    world_size=st.just(0),
)
ends = st.builds(
    EndedProcess,
    *(st.just(labels_of(3)), st.sampled_from([*STATES]), maybe, phase, moment, moment, moment),
    *(text, st.sampled_from([{}, {"signal": "SIGKILL"}, {"exit_code": 1, "xid": ["x"]}]), maybe),
    last_present_ns=st.just(0),
    known_for_s=st.just(0.0),
)
nonfinite = st.builds(NonfiniteValue, text, text, st.floats(allow_nan=False), maybe, moment, maybe)


@settings(max_examples=50, deadline=None)
@given(evidence, states, ends, st.lists(nonfinite, max_size=3), st.builds(Memory, whole, whole))
def test_all_else_is_the_same_on_the_other_node(
    given_evidence: Evidence,
    rank: RankState,
    ended: EndedProcess,
    values: list[NonfiniteValue],
    memory: Memory,
) -> None:
    process = wire.Process()
    pack.pack_state(process.state, rank.labels, rank, "p", True)
    pack.pack_evidence(process.evidence, given_evidence)
    pack.pack_end(process.end, ended)
    pack.pack_nonfinite(process, values)
    pack.pack_memory(process.memory, memory)
    process = sent(process)

    assert pack.unpack_labels(process.state) == rank.labels
    assert pack.unpack_state(process.state, rank.labels, 0) == rank
    assert pack.unpack_evidence(process.evidence, 0) == given_evidence
    assert pack.unpack_end(process.end, rank.labels, 0) == ended
    assert pack.unpack_nonfinite(process, 0) == values
    assert pack.unpack_memory(process.memory) == memory


@given(
    st.builds(
        Position,
        *(st.just(labels_of(3)), st.booleans(), st.sampled_from([*STATES]), maybe, phase),
        *(moment, text, st.none() | st.floats(0, 1e6), whole, maybe, st.booleans()),
        waits_in=st.just(frozenset({"data"})),
    )
)
@settings(max_examples=50, deadline=None)
def test_a_position_is_the_same_on_the_other_node(position: Position) -> None:
    rank = RankState(position.labels, waits_known=True, own_collectives=("data",))
    message = wire.Position()
    pack.pack_position(message, position)

    assert pack.unpack_position(sent(message), rank, position.since_ns) == position


@pytest.mark.parametrize(
    "damage",
    [
        lambda message: message.spans_ns.append(1),
        lambda message: message.numbers.append(1),
        lambda message: message.paced.append(1),
        lambda message: setattr(message, "count", 1 << 30),
        lambda message: message.CopyFrom(wire.Steps(count=1000)),
        lambda message: setattr(message, "rests", 9),
        lambda message: message.spans_ns.__setitem__(0, 2**64 - 1),
    ],
)
def test_steps_that_make_no_sense_are_refused(damage: Any) -> None:
    process = wire.Process()
    parts = Parts(10**18, bytes([1, 2]), (MS, MS))
    for number in (1, 2):
        step = Step(number, 10**18, 10**18 + 2 * MS, parts, (), 0.0, False, 0)
        pack.pack_device_steps(process.device_steps, [step._replace(paced=(5,), lag_ns=1)] * 2)
    damage(process.device_steps[0])

    with pytest.raises(pack.Senseless):
        pack.unpack_steps(process.device_steps, 0)


# -- two judges of one run: one has all journals, the other has two of four ranks told by the link


class Rank(WrittenRank):
    """A rank of either node, and the way to it of an agent there."""

    def __init__(self, folder: Path, number: int, node: str, ledger: Ledger) -> None:
        folder.mkdir()
        super().__init__(folder, number, 128 * 1024, world_size=4)
        self.rank, self.alive = number, True
        self.writer.document(layout.FACTS, {"capability": {"comm_wait": ""}})
        self.journal = JournalFeed(JournalReader(self.writer.path), ledger, lambda _: node)
        self.enter("forward")
        self.state("running")


class TwoNodes:
    """Four ranks on two nodes, and a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger()
        self.now_ns = time.monotonic_ns()
        self.ranks = [
            Rank(folder / str(number), number, f"node-{number // 2}", self.ledger)
            for number in range(4)
        ]
        self.whole, self.lead = (
            Judge(self.ledger, 60.0, folder / name, clock=lambda: self.now_ns)
            for name in ("whole", "lead")
        )
        self._sources = JournalSources(ExitCauses())
        self._reports: dict[Source, ProcessReport] = {}
        self.told: dict[int, NodeSource] = {}

    def poll(self, later_s: float = 1.0) -> None:
        self.now_ns += int(later_s * 1e9)
        now_ns = time.time_ns()
        for rank in self.ranks:
            if not rank.alive and not rank.journal.life.gone_ns:
                rank.journal.life.gone_ns = now_ns
            rank.journal.poll(now_ns, rank.alive)
        sources = self._sources.of([rank.journal for rank in self.ranks])
        self.whole.poll(sources)
        for each in self.told.values():
            each.forget_news()
        for source in sources:
            if dict(source.labels)["node"] == "node-1":
                self._report(source)
        here = [each for each in sources if dict(each.labels)["node"] == "node-0"]
        self.lead.poll([*here, *self.told.values()])
        self._carry_questions()

    def _report(self, source: Source) -> None:
        """What the agent of node-1, whose clock is behind, sends to that of node-0."""
        known = self._reports.setdefault(source, ProcessReport(len(self._reports) + 1, source))
        known.gather(self.now_ns)
        message = wire.Process()
        known.write(message, self.now_ns, time.time_ns() - time.monotonic_ns(), 0)
        process = sent(message)
        told = self.told.get(process.id)
        if told is None:
            told = self.told[process.id] = NodeSource(process.state, 0)
        told.feed(process, 0, self.now_ns)

    def _carry_questions(self) -> None:
        for known in self._reports.values():
            told = self.told[known.number]
            for question in told.questions:
                known.ask(question, self.now_ns)
            told.questions.clear()

    def train(self, steps: int, late: Mapping[int, float]) -> None:
        """So many steps; some ranks are late in backward, by so many ms."""
        for number in range(steps):
            for rank in self.ranks:
                own = late.get(rank.rank, 0.0)
                jitter = (number * 7 + rank.rank * 3) % 5 / 10
                waits = max(late.values(), default=0.0) - own
                spent = {"forward": 10.0, "backward": 20.0 + own + jitter, "optimizer": 5.0}
                rank.step({**spent, "comm_wait": 1.5 + waits - jitter})
            if number % 25 == 24:
                self.poll()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    made = TwoNodes(tmp_path)
    yield made
    for rank in made.ranks:
        rank.journal.reader.close()
        rank.close()


def test_a_late_rank_of_another_node_is_found_as_if_its_journal_were_here(nodes: TwoNodes) -> None:
    nodes.train(200, late={3: 12.0})

    (found,) = nodes.lead.verdicts()

    assert (found["kind"], found["who"]["rank"], found["phase"]) == ("straggler", "3", "backward")
    assert found["sentence"].startswith("rank 3 (node-1) keeps the others waiting")
    assert nodes.lead.verdicts() == nodes.whole.verdicts()


def test_growing_memory_of_another_nodes_device_is_found_as_if_its_journal_were_here(
    nodes: TwoNodes,
) -> None:
    writer = nodes.ranks[3].writer
    held = writer.counter(catalog.TRAINING_DEVICE_MEMORY_ALLOCATED.name)
    writer.set(writer.counter(catalog.TRAINING_DEVICE_MEMORY_LIMIT.name), 16 * 2.0**30)
    for number in range(15 * 6):
        writer.set(held, 2.0**30 + number * 2.0**23)
        nodes.train(1, late={})
        nodes.poll(later_s=10)

    (found,) = nodes.lead.verdicts()

    assert found["kind"] == "creep"
    assert found["sentence"].startswith("the memory of the device of rank 3 (node-1) has grown")
    assert found["evidence"]["memory_of"] == "device"
    (beside,) = nodes.whole.verdicts()
    assert without_figures(found["sentence"]) == without_figures(beside["sentence"])


def test_equal_ranks_of_two_nodes_are_compared_and_none_is_named(nodes: TwoNodes) -> None:
    nodes.train(200, late={})

    assert (nodes.lead.verdicts(), nodes.lead.insufficient()) == ([], [])


def test_a_rank_of_another_node_that_dies_is_told_with_its_node(nodes: TwoNodes) -> None:
    nodes.train(30, late={})
    nodes.ranks[2].alive = False
    nodes.poll()

    (found,) = nodes.lead.verdicts()

    assert (found["kind"], found["who"]["node"], found["who"]["rank"]) == ("death", "node-1", "2")
    # When it was last seen alive is known less precisely: its clock is another one.
    beside = nodes.whole.verdicts()[0]["sentence"]
    assert without_figures(found["sentence"]) == without_figures(beside)
