"""A lead and its followers over TLS: where it listens, what travels, what a cut link costs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any, cast

import pytest
from tools.stack.server import free_port

from agent.link import linked
from agent.link.linked import Links, until
from otel_ddp import __version__
from otel_ddp.agent.link import addresses, channel, client, credentials
from otel_ddp.agent.link.channel import Channel
from otel_ddp.agent.link.client import LinkClient
from otel_ddp.agent.link.link_pb2 import Answer, Question, Report
from otel_ddp.agent.link.link_thread import within
from otel_ddp.agent.link.server import Door, LinkServer


def send(follower: LinkClient, *texts: bytes) -> None:
    for text in texts:
        follower.send(Report(readings=text))


def said(lead: LinkServer, count: int) -> list[tuple[str, bytes]]:
    """The next reports of the lead, each with its node."""
    taken: list[tuple[str, Any]] = []
    until(lambda: taken.extend(lead.take()) or len(taken) >= count)
    return [(node, report.readings) for node, report in taken]


def test_reports_reach_the_lead_in_order_and_questions_come_back_at_once(links: Links) -> None:
    lead, follower = links.lead(), links.follower()
    until(lambda: follower.is_connected)

    send(follower, b"a", b"b", b"c")
    found = said(lead, 3)
    lead.answer("node-1", Answer(questions=[Question(kind=Question.WHERE)]))
    (answer,) = until(follower.take)

    assert found == [("node-1", b"a"), ("node-1", b"b"), ("node-1", b"c")]
    assert [each.kind for each in answer.questions] == [Question.WHERE]
    assert follower.state.startswith(f"connected to node-0 (127.0.0.1:{links.port}) since ")
    assert lead.state == f"listens on port {links.port} of 127.0.0.1"
    # Both ends are on one machine.
    assert follower.clock_offset_ns is not None
    assert abs(follower.clock_offset_ns - (time.time_ns() - time.monotonic_ns())) < 1e9


def test_a_lead_that_answers_without_end_is_read_as_fast_as_it_is_understood(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = links.follower(ports=[server.getsockname()[1]])
        here, _ = server.accept()
        with credentials.context(linked.SECRET, leads=True).wrap_socket(
            here, server_side=True
        ) as lead:
            asks = Answer(questions=[Question(process=3, kind=Question.WHERE)])
            lead.sendall(framed(Answer(agent=1)) * 20_000 + framed(asks))
            waiting: list[int] = []

            def has_asked() -> bool:
                if follower._link is not None:
                    waiting.append(follower._link._messages.qsize())
                return bool(follower.take())

            until(has_asked)

    assert max(waiting) <= 65


def framed(answer: Any) -> bytes:
    content: bytes = answer.SerializeToString()
    return len(content).to_bytes(4, "big") + content


def test_a_peer_that_reads_no_answers_is_not_read_once_it_has_rested() -> None:
    class End(Channel):
        def received(self, message: bytes) -> None:
            pass

    class Transport:
        reads = True

        def is_closing(self) -> bool:
            return False

        def pause_reading(self) -> None:
            self.reads = False

        def resume_reading(self) -> None:
            self.reads = True

    transport: Any = Transport()
    channel = End(credentials.context(linked.SECRET, leads=True), 1)
    channel.transport = transport
    channel.hold("rests", True)
    channel.hold("reads no answers", True)
    channel.hold("rests", False)
    assert not transport.reads

    channel.hold("reads no answers", False)
    assert transport.reads


def test_what_is_too_large_costs_itself_and_not_the_link(links: Links) -> None:
    lead, follower = links.lead(), links.follower()
    until(lambda: follower.is_connected)
    most = Report(readings=b"x" * (channel.MOST_REPORT_BYTES - 200))

    follower.send(Report(readings=b"x" * channel.MOST_REPORT_BYTES))
    follower.send(most)
    large, asked = b"x" * channel.MOST_ANSWER_BYTES, [Question(process=3, kind=Question.WHAT)]
    lead.answer("node-1", Answer(judged=large))
    lead.answer("node-1", Answer(judged=large, questions=asked))
    lead.answer("node-1", Answer(judged=large[8:]))
    found = said(lead, 1)
    answers: list[Any] = []
    until(lambda: answers.extend(follower.take()) or len(answers) == 2)

    assert [len(text) for _, text in found] == [channel.MOST_REPORT_BYTES - 200]
    # A question arrives without the judgement.
    assert [(len(each.judged), len(each.questions)) for each in answers] == [
        (0, 1),
        (channel.MOST_ANSWER_BYTES - 8, 0),
    ]
    assert lead.refused == {"large answer": 2}
    assert follower.is_connected


def test_a_link_that_was_cut_comes_back_to_the_same_lead_or_to_another(links: Links) -> None:
    lead, relay = links.lead(), links.relay()
    follower = links.follower(ports=[relay.port])
    until(lambda: follower.is_connected)
    send(follower, b"a")
    found = said(lead, 1)

    relay.cut()
    until(lambda: follower.state.startswith("lost "))
    # The lead asks for what it lacks of journals.
    send(follower, b"b", b"c")
    relay.mend()
    until(lambda: follower.is_connected)
    send(follower, b"d")
    found += said(lead, 1)

    assert found == [("node-1", b"a"), ("node-1", b"d")]
    relay.cut()
    lead.stop()
    until(lambda: lead.state == "does not listen")
    until(lambda: not follower.is_connected)
    successor = links.lead()
    relay.mend()
    until(lambda: follower.is_connected)
    send(follower, b"e")
    assert said(successor, 1) == [("node-1", b"e")]


def test_what_an_agent_has_sent_is_with_the_lead_before_it_ends(links: Links) -> None:
    lead, follower = links.lead(), links.follower()
    until(lambda: follower.is_connected)

    send(follower, *(b"%d" % number for number in range(50)))
    follower.stop()

    assert [report.readings for _, report in lead.take()][-1:] == [b"49"]


def test_both_ends_notice_within_seconds_that_nothing_comes_any_more(links: Links) -> None:
    links.lead(most_nodes=1)
    relay = links.relay()
    follower = links.follower(ports=[relay.port])
    until(lambda: follower.is_connected)
    other = links.follower(node="node-2")
    until(lambda: "the lead takes 1 node" in other.state)

    frozen = time.monotonic()
    relay.freeze()
    until(lambda: not follower.is_connected)
    # The lead has room for it once the first one is gone.
    until(lambda: other.is_connected)
    noticed_s = time.monotonic() - frozen

    assert follower.state == f"lost 127.0.0.1:{relay.port}: no longer heard"
    # 8 s on a machine that is not busy.
    assert noticed_s < 40


def test_a_message_that_takes_long_on_a_slow_network_ends_no_link(links: Links) -> None:
    lead = links.lead()
    until(lambda: lead.state.startswith("listens"))
    known = {"node": "node-1", "agent": 1}
    greeting = Report(version=__version__, agent_began_ns=1, **known)
    message = framed(Report(readings=b"a" * 1000, **known))

    made = socket.create_connection(("127.0.0.1", links.port))
    context = credentials.context(linked.SECRET, leads=False)
    with context.wrap_socket(made, server_hostname=credentials.NAME) as link:
        link.sendall(framed(greeting))
        size = int.from_bytes(link.recv(4), "big")
        assert len(link.recv(size)) == size
        # Longer than the 8 s after which an end that says nothing is dead.
        for at in range(10):
            link.sendall(message[at : at + 1])
            threading.Event().wait(1.0)
        link.sendall(message[10:])
        (taken,) = until(lead.take)
        heard = link.recv(4)

    assert taken[1].readings == b"a" * 1000
    # Meanwhile the follower hears what answers a ping.
    assert heard == b"\0" * 4


def test_a_follower_finds_its_lead_behind_the_wrong_places(links: Links) -> None:
    taken = links.lead(bytes(32))
    until(lambda: taken.state.startswith("listens"))
    lead = links.lead(ports=[links.port, free_port()])

    # One of them lets everybody in, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wrong = [free_port(), silent.getsockname()[1]]
        follower = links.follower(
            hosts=["no-such-host.invalid", "127.0.0.1"], ports=[*wrong, *lead.ports]
        )
        until(lambda: follower.is_connected)
        send(follower, b"a")

        assert said(lead, 1) == [("node-1", b"a")]
    assert not taken.take()


def test_a_follower_says_why_it_reaches_no_lead(links: Links) -> None:
    other = links.lead(bytes(32))
    until(lambda: other.state.startswith("listens"))
    closed = free_port()

    follower = links.follower(
        hosts=["127.0.0.1", "no-such-host.invalid"], ports=[closed, links.port]
    )
    until(lambda: follower.state.startswith("cannot"))

    assert follower.state.startswith(
        f"cannot reach the lead: 127.0.0.1:{closed}: connection refused; "
        f"127.0.0.1:{links.port}: it is not the lead of this run; no-such-host.invalid: "
    )


def test_where_all_ports_are_taken_the_lead_says_so(links: Links) -> None:
    first = links.lead()
    until(lambda: first.state.startswith("listens"))

    second = links.lead()
    until(lambda: second.state.startswith("cannot"))

    assert second.state == f"cannot listen on 127.0.0.1: its ports {links.port} are taken"


def test_a_newer_agent_of_a_node_replaces_the_older_one_and_not_the_other_way(links: Links) -> None:
    lead = links.lead()
    older, newer = links.follower(), links.follower()

    until(lambda: newer.is_connected and "newer agent of a node" in older.state)
    send(newer, b"a")

    assert said(lead, 1) == [("node-1", b"a")]
    assert newer.is_connected
    assert lead.refused["second agent"] >= 1


def test_agents_of_different_versions_do_not_talk_and_say_so(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = links.lead()
    monkeypatch.setattr(client, "__version__", "0.0.9")
    follower = links.follower()
    until(lambda: follower.state.startswith("cannot"))

    why = f"its otel_ddp is {__version__}, and the nodes of a run need one version"
    assert follower.state == f"cannot reach the lead: 127.0.0.1:{links.port}: {why}"
    assert lead.refused == {"other version": 1}


def test_a_wait_that_is_cancelled_as_its_result_comes_is_cancelled() -> None:
    async def cancelled() -> None:
        result = asyncio.get_running_loop().create_future()
        waits = asyncio.create_task(within(3600, result))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        result.set_result(None)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(cancelled())


def listened_on(*hosts: str) -> str:
    return addresses.names(asyncio.run(addresses.to_listen_on(hosts)))


@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["localhost"], ["127.0.0.1", "localhost"]])
def test_where_only_loopback_is_named_nothing_else_is_listened_on(hosts: list[str]) -> None:
    assert set(listened_on(*hosts).split(", ")) <= {"127.0.0.1", "::1"}


# 192.0.2.0/24 is no machine's: RFC 5737.
@pytest.mark.parametrize(
    "hosts", [[], ["192.0.2.1"], ["no-such-host.invalid"], ["127.0.0.1", "192.0.2.1"]]
)
def test_where_no_address_of_this_machine_is_named_all_are_listened_on(hosts: list[str]) -> None:
    assert listened_on(*hosts) == "all addresses"


def test_an_address_of_this_machine_beyond_loopback_is_the_only_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: the kernel says which address it would send from.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address beyond loopback")
        own = probe.getsockname()[0]

    assert listened_on("192.0.2.1", "127.0.0.1", own) == own


def test_the_first_host_that_means_an_address_of_this_machine_is_the_only_one() -> None:
    ours = {"10.0.0.1", "172.17.0.1", "198.51.100.1"}

    def listened(*hosts: str) -> list[str]:
        return asyncio.run(addresses.to_listen_on(hosts, ours.__contains__))

    assert listened("10.0.0.1", "198.51.100.1", "172.17.0.1") == ["10.0.0.1"]
    # The master is elsewhere: any of these may be the one that others reach.
    assert listened("192.0.2.1", "198.51.100.1", "10.0.0.1") == ["198.51.100.1", "10.0.0.1"]


def test_a_lead_that_listens_on_all_addresses_is_reached_on_loopback(links: Links) -> None:
    lead = links.lead(hosts=["192.0.2.1"])
    follower = links.follower()

    until(lambda: follower.is_connected)

    assert lead.state == f"listens on port {links.port} of all addresses"


def test_places_are_written_as_people_write_them() -> None:
    assert str(addresses.Place("10.0.0.1", 80)) == "10.0.0.1:80"
    assert str(addresses.Place("fd00::1", 80)) == "[fd00::1]:80"


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_door_that_is_closed_while_it_opens_leaves_no_port_taken(rounds: int) -> None:
    port = free_port()

    async def close_after(rounds: int) -> None:
        door = Door()
        opening = asyncio.ensure_future(door.listen(["127.0.0.1"], [port], cast(Any, object)))
        for _ in range(rounds):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        door.close()
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(close_after(rounds))
