"""A process of another node, told over the link: nothing that a judge needs is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from make import MS, labels_of
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.reading.steps import Parts, Step
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Memory, NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import Collective, Evidence, Frame, Group, Kernel, Position
from otel_ddp.vocabulary.words import STATES

AHEAD_NS = 3_000_000_000
"""The clock of the other node is behind the lead's by so much."""

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
