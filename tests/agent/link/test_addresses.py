"""Where a lead listens, and which ports it takes there."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
from tools.stack.server import free_port

from agent.link.linked import Links, until
from otel_ddp.agent.link import addresses
from otel_ddp.agent.link.server import Door


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
