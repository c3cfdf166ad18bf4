"""What holds whatever an agent that has the secret sends: a report, an answer, or garbage."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.link.linked import SECRET
from otel_ddp import __version__
from otel_ddp.agent.link.link_pb2 import Answer, Process, Report, Stretch
from otel_ddp.agent.link.link_thread import LinkThread
from otel_ddp.agent.link.server import LinkServer

QUIET = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Peer:
    """A connection whose other end has the secret: what it was answered, and why it was ended."""

    greeting: Any = None
    is_writable = True

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.ended = ""

    def send(self, message: bytes) -> None:
        self.answers.append(Answer.FromString(message))

    def end(self, message: bytes) -> None:
        self.ended = Answer.FromString(message).refused


def lead_of_four() -> LinkServer:
    return LinkServer(LinkThread(), SECRET, node="node-0", hosts=[], ports=[], most_nodes=4)


def serve(lead: LinkServer, *messages: bytes) -> Peer:
    """A connection that sends these, and then is gone."""
    peer: Any = Peer()
    for each in messages:
        if not peer.ended:
            lead.heard(peer, each)
    lead.gone(peer)
    return peer


def report(text: bytes = b"", *, node: str = "node-1", agent: int = 1, **more: Any) -> bytes:
    sender = {"node": node, "agent": agent, "agent_began_ns": agent, "version": __version__}
    return bytes(Report(**sender, readings=text, **more).SerializeToString())


NODES = st.sampled_from(["", "node-1", "node-2", "n" * 300, "\u2603\n"])
REPORTS = st.builds(
    report,
    st.binary(max_size=9),
    node=NODES,
    agent=st.integers(0, 2),
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
    taken = lead.take()

    for node, each in taken:
        assert node == each.node
        assert 0 < len(node) <= 253
        assert node.isprintable()
    assert len(taken) <= sum(max(len(messages) - 1, 0) for messages in all_messages)
    assert len([peer for peer in peers if peer.ended]) <= sum(lead.refused.values())


def test_each_refusal_is_counted_by_its_reason() -> None:
    lead = lead_of_four()

    serve(lead, report(), report(b"a"), report(b"b"))
    serve(lead, report(node="node\n1"))
    serve(lead, report(), b"\xff")
    serve(lead, report(), report(b"c", node="node-2"))

    assert [each.readings for _, each in lead.take()] == [b"a", b"b"]
    assert lead.refused == {"no name": 1, "unreadable": 1, "other node": 1}


def test_what_waits_takes_no_more_memory_than_it_may_whatever_it_is_made_of() -> None:
    lead = lead_of_four()
    pieces = report(processes=[Process(records=Stretch(content=[b""] * 100_000))])
    parts = report(processes=[Process()] * 8000)

    # Each part takes 160 bytes and each piece 32.
    serve(lead, report(), *[pieces] * 40)
    assert 0 < len(lead.take()) * 100_000 * 32 <= 32 << 20
    serve(lead, report(), *[parts] * 40)
    assert 0 < len(lead.take()) * 8000 * 160 <= 32 << 20
    many = serve(lead, report(), report(processes=[Process()] * 8193))
    assert many.ended == "a report of too many parts"
