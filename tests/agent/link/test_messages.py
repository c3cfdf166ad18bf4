"""Messages of agents: whatever is sent, while they wait, and the clocks that they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.link.linked import SECRET
from otel_ddp import __version__
from otel_ddp.agent.link import link_pb2
from otel_ddp.agent.link.client import ClockOffset
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.server import LinkServer


def test_the_generated_code_takes_every_runtime_that_opentelemetrys_takes() -> None:
    assert "# Protobuf Python Version: 5.26" in Path(str(link_pb2.__file__)).read_text()


QUIET = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Peer:
    """A connection whose other end has the secret, and why it was ended."""

    greeting: Any = None

    def __init__(self) -> None:
        self.ended = ""

    def send(self, message: bytes) -> None: ...

    def end(self, message: bytes) -> None:
        self.ended = Answer.FromString(message).refused


def lead_of_four() -> LinkServer:
    no_thread: Any = None
    return LinkServer(no_thread, SECRET, node="node-0", hosts=[], ports=[], most_nodes=4)


def serve(lead: LinkServer, *messages: bytes) -> Peer:
    """A connection that sends these, and then is gone."""
    peer: Any = Peer()
    for each in messages:
        if not peer.ended:
            lead.receive(peer, each)
    lead.gone(peer)
    return peer


def report(text: bytes = b"", *, node: str = "node-1", began_ns: int = 1, **more: Any) -> bytes:
    sender = {"node": node, "agent_began_ns": began_ns, "version": __version__}
    return bytes(Report(**sender, readings=text, **more).SerializeToString())


NODES = st.sampled_from(["", "node-1", "node-2", "n" * 300, "\u2603\n"])
REPORTS = st.builds(
    report,
    st.binary(max_size=9),
    node=NODES,
    began_ns=st.integers(0, 2),
    sent_ns=st.integers(-(2**63), 2**63 - 1),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(REPORTS))
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


@QUIET
@given(st.lists(st.lists(REPORTS | damaged() | st.binary(max_size=40), max_size=6), max_size=6))
def test_whatever_comes_is_a_report_or_is_refused(all_messages: list[list[bytes]]) -> None:
    lead = lead_of_four()

    peers = [serve(lead, *messages) for messages in all_messages]
    taken = list(lead.take())

    for node, _ in taken:
        assert 0 < len(node) <= 253
        assert node.isprintable()
    assert len(taken) <= sum(max(len(messages) - 1, 0) for messages in all_messages)
    assert len([peer for peer in peers if peer.ended]) <= sum(lead.refused.values())


def test_each_refusal_is_counted_by_its_reason() -> None:
    lead = lead_of_four()

    serve(lead, report(), report(b"a"), report(b"b"))
    serve(lead, report(node="node\n1"))
    serve(lead, report(node="node-0"))
    serve(lead, report(), b"\xff")

    assert [each.readings for _, each in lead.take()] == [b"a", b"b"]
    assert lead.refused == {
        "no name of a node": 1,
        "the lead's node has this name: give each one its OTEL_DDP_NODE": 1,
        "a report that cannot be read": 1,
    }


def test_where_reports_wait_too_long_the_oldest_are_dropped() -> None:
    lead = lead_of_four()
    messages = [report(bytes([number]) * (4 << 20)) for number in range(10)]

    serve(lead, report(), *messages)

    assert [each.readings[0] for _, each in lead.take()] == [3, 4, 5, 6, 7, 8, 9]
    assert not list(lead.take())


S = 1_000_000_000
DELAYS = st.integers(0, 30_000_000)


@settings(deadline=None, database=None, derandomize=True)
@given(
    st.integers(-10 * S, 10 * S),
    st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=80),
)
def test_the_offset_is_right_within_its_uncertainty(
    offset_ns: int, exchanges: list[tuple[int, int, int]]
) -> None:
    clock, now = ClockOffset(), 1_000 * S
    for there, in_between, back in exchanges:
        arrived, left = now + there, now + there + in_between
        clock.add(now, arrived + offset_ns, left + offset_ns, left + back)
        now += S

        assert clock.ns is not None
        assert abs(clock.ns - offset_ns) <= clock.uncertainty_ns
