"""A lead and its followers over TLS: where it listens, what travels, what a cut link costs."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from tools.stack.server import free_port

from agent.link.linked import Links, until
from otel_ddp import __version__
from otel_ddp.agent.link import client
from otel_ddp.agent.link.client import LinkClient
from otel_ddp.agent.link.link_pb2 import Answer, Question, Report
from otel_ddp.agent.link.server import LinkServer


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
    lead.answer("node-1", Answer(questions=[Question(asked="where")]))
    (answer,) = until(follower.take)

    assert found == [("node-1", b"a"), ("node-1", b"b"), ("node-1", b"c")]
    assert [each.asked for each in answer.questions] == ["where"]
    assert follower.state.startswith(f"connected to node-0 (127.0.0.1:{links.port}) since ")
    assert lead.state == f"listens on port {links.port} of 127.0.0.1"
    # Both ends are on one machine.
    assert follower.clock_offset_ns is not None
    assert abs(follower.clock_offset_ns - (time.time_ns() - time.monotonic_ns())) < 1e9


def test_a_link_that_was_cut_comes_back_to_the_next_agent_of_the_lead(links: Links) -> None:
    lead, follower = links.lead(), links.follower()
    until(lambda: follower.is_connected)

    lead.stop()
    until(lambda: follower.state.startswith("lost "))
    # The lead asks for what it lacks of journals.
    send(follower, b"b")
    successor = links.lead()
    until(lambda: follower.is_connected)
    send(follower, b"c")

    assert said(successor, 1) == [("node-1", b"c")]


def test_what_an_agent_has_sent_is_with_the_lead_before_it_ends(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second is too short on a busy machine.
    monkeypatch.setattr(client, "_CONFIRMED_WITHIN_S", 60.0)
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

    assert follower.state == f"lost 127.0.0.1:{relay.port}: no answer"
    # 8 s on a machine that is not busy.
    assert noticed_s < 40


def test_a_follower_finds_its_lead_behind_the_wrong_places(links: Links) -> None:
    taken = links.lead(bytes(32))
    until(lambda: taken.state.startswith("listens"))
    lead = links.lead(ports=[links.port, free_port()])

    # One of them lets everybody in, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wrong = [free_port(), silent.getsockname()[1]]
        follower = links.follower(
            hosts=["no-such-host.invalid", "no..name", "127.0.0.1"], ports=[*wrong, *lead.ports]
        )
        until(lambda: follower.is_connected)
        send(follower, b"a")

        assert said(lead, 1) == [("node-1", b"a")]
    assert not list(taken.take())


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
        f"127.0.0.1:{links.port}: it is not the lead of this run; no-such-host.invalid:{closed}, "
    )


def test_where_all_ports_are_taken_the_lead_says_so(links: Links) -> None:
    first = links.lead()
    until(lambda: first.state.startswith("listens"))

    second = links.lead()
    until(lambda: second.state.startswith("cannot"))

    assert second.state == f"cannot listen: its ports {links.port} are taken"


def test_a_newer_agent_of_a_node_replaces_the_older_one_and_not_the_other_way(links: Links) -> None:
    lead = links.lead()
    older, newer = links.follower(), links.follower()

    until(lambda: newer.is_connected and "newer agent of this node" in older.state)
    send(newer, b"a")

    assert said(lead, 1) == [("node-1", b"a")]
    assert newer.is_connected
    assert lead.refused["a newer agent of this node is connected (OTEL_DDP_NODE)"] >= 1


def test_agents_of_different_versions_do_not_talk_and_say_so(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = links.lead()
    until(lambda: lead.state.startswith("listens"))
    monkeypatch.setattr(client, "__version__", "0.0.9")
    follower = links.follower()
    until(lambda: follower.state.startswith("cannot"))

    why = f"the nodes of a run need one version of otel_ddp, {__version__}"
    assert follower.state == f"cannot reach the lead: 127.0.0.1:{links.port}: {why}"
    assert lead.refused == {why: 1}


def test_the_lead_of_a_run_on_several_hosts_listens_on_all_addresses(links: Links) -> None:
    lead, follower = links.lead(hosts=["no-such-host.invalid"]), links.follower()

    until(lambda: follower.is_connected)

    assert lead.state == f"listens on port {links.port} of all addresses"
