"""The addresses under which other nodes may reach this machine, by the kernel's own routes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

import namespaces
from otel_ddp.identity.lead import addresses_here


@pytest.fixture
def machine() -> Iterator[namespaces.Namespace]:
    if why := namespaces.why_none():
        pytest.skip(f"no network namespaces here: {why}")
    found = namespaces.Namespace("node-0")
    try:
        yield found
    finally:
        found.close()


def test_they_are_those_on_the_way_to_the_master_and_to_a_gateway(
    machine: namespaces.Namespace,
) -> None:
    # A network behind a gateway, one of the ranks, and one of this machine's containers.
    networks = {"eth0": "10.0.0.2/24", "ib0": "10.9.0.2/24", "docker0": "172.17.0.1/16"}
    for name, address in networks.items():
        machine.ip(
            f"link add {name} type veth peer name {name}-peer",
            f"address add {address} dev {name}",
            *(f"link set {each} up" for each in (name, f"{name}-peer")),
        )
    machine.ip(
        "address add fd00::2/64 dev eth0 nodad",
        "route add default via 10.0.0.1",
        "route add ::/0 via fd00::1",
    )

    # Loopback means this machine alone, and no name server is asked.
    first = dict.fromkeys(("", "127.0.0.1", "::1", "localhost", "node-1"), "10.0.0.2")
    first |= {"10.9.0.7": "10.9.0.2", "10.9.0.2": "10.9.0.2", "fd00::7": "fd00::2"}
    for master, ours in first.items():
        found = machine.inside(partial(addresses_here, master))
        assert found == [*dict.fromkeys([ours, "10.0.0.2", "fd00::2"])], master


def test_without_a_way_to_other_machines_there_are_none(machine: namespaces.Namespace) -> None:
    assert machine.inside(partial(addresses_here, "10.9.0.7")) == []
