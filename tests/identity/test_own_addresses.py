"""The addresses under which other nodes may reach this machine, by the kernel's tables."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from otel_ddp.identity.own_addresses import addresses_here

# As Linux writes them.
TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     +-- 127.0.0.0/8 2 0 2
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     +-- 10.0.0.0/24 2 0 2
           |-- 10.0.0.0
              /24 link UNICAST
"""
LOOPBACK_6 = "00000000000000000000000000000001 01 80 10 80       lo\n"
LINK_6 = "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
ETH0_6 = "fd000000000000000000000000000002 04 40 00 82     eth0\n"
SERVICE_6 = "fdaa000000000000000000000000000{} 05 80 00 82 kube-ipvs0\n"
ROUTE_6 = (
    "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
    "fd000000000000000000000000000001 00000400 00000001 00000000 00000003     eth0\n"
)


class Machine:
    """What the kernel tells of one."""

    def __init__(self, root: Path) -> None:
        self._proc, self._interfaces = root / "proc", root / "net"
        (self._proc / "self/net").mkdir(parents=True)
        self._trie, self._routes = TRIE, "Iface\tDestination\tGateway\n"

    def has(self, *addresses: str) -> None:
        for each in addresses:
            self._trie += f"           |-- {each}\n              /32 host LOCAL\n"

    def bridge(self, name: str) -> None:
        (self._interfaces / name / "bridge").mkdir(parents=True)

    def route(
        self, interface: str, to: str, bits: int, *, gateway: str = "0.0.0.0", metric: int = 0
    ) -> None:
        mask = (1 << 32) - (1 << (32 - bits))
        numbers = [*map(_numbers, (to, gateway)), struct.pack(">I", mask)]
        network, behind, masked = (f"{struct.unpack('=I', each)[0]:08X}" for each in numbers)
        self._routes += f"{interface}\t{network}\t{behind}\t0001\t0\t0\t{metric}\t{masked}\t0\t0\n"

    def write_6(self, addresses: str, routes: str = "") -> None:
        (self._proc / "self/net/if_inet6").write_text(addresses)
        (self._proc / "self/net/ipv6_route").write_text(routes)

    def addresses(self, master: str = "") -> list[str]:
        (self._proc / "self/net/fib_trie").write_text(self._trie)
        (self._proc / "self/net/route").write_text(self._routes)
        return addresses_here(master, self._proc, self._interfaces)


def _numbers(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With a network of the site, which has a gateway, and a fast one without."""
    made = Machine(tmp_path)
    made.has("192.168.9.5", "10.0.0.5")
    made.route("ib0", "192.168.9.0", 24)
    made.route("eth0", "10.0.0.0", 24)
    made.route("eth0", "0.0.0.0", 0, gateway="10.0.0.1")
    return made


def test_without_tables_there_is_no_address(tmp_path: Path) -> None:
    assert addresses_here("", tmp_path, tmp_path) == []


def test_what_has_a_gateway_comes_first_and_loopback_is_left_out(machine: Machine) -> None:
    machine.write_6(f"{LOOPBACK_6}{LINK_6}{ETH0_6}damaged\n", ROUTE_6)

    assert machine.addresses() == ["10.0.0.5", "fd00::2", "192.168.9.5"]


@pytest.mark.parametrize(
    ("master", "first"),
    [
        ("192.168.9.7", "192.168.9.5"),
        ("192.168.9.5", "192.168.9.5"),
        ("10.0.0.7", "10.0.0.5"),
        ("fd00::2", "fd00::2"),
        ("node-0", "10.0.0.5"),
    ],
)
def test_the_address_on_the_way_to_the_master_comes_first(
    master: str, first: str, machine: Machine
) -> None:
    machine.write_6(ETH0_6, ROUTE_6)

    found = machine.addresses(master)

    assert found[0] == first
    assert len(found) == 3


def test_the_narrowest_and_then_the_cheapest_route_leads_to_the_master(machine: Machine) -> None:
    machine.has("10.2.0.5")
    machine.route("eth1", "10.2.0.0", 16)
    machine.route("eth1", "10.3.0.0", 16, gateway="10.2.0.1", metric=200)
    machine.route("ib0", "10.3.0.0", 16, gateway="192.168.9.1", metric=100)

    assert machine.addresses("10.3.0.9")[0] == "192.168.9.5"


def bridges(machine: Machine, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        machine.has(f"172.{17 + number}.0.1")
        machine.route(name, f"172.{17 + number}.0.0", 16)
        machine.bridge(name)


def test_bridges_of_this_node_take_no_place_of_another_address(machine: Machine) -> None:
    bridges(machine, ["docker0", "virbr0", *(f"br-{number}" for number in range(9))])

    assert machine.addresses() == ["10.0.0.5", "192.168.9.5"]


def test_a_bridge_with_the_gateway_or_the_master_behind_it_counts(machine: Machine) -> None:
    bridges(machine, ["br0", "br1", "br2"])
    machine.route("br1", "10.9.0.0", 16, gateway="172.18.0.254")

    assert machine.addresses("172.17.0.9") == [
        *("172.17.0.1", "10.0.0.5", "172.18.0.1", "192.168.9.5")
    ]


def test_addresses_of_services_take_no_place_of_another_address(machine: Machine) -> None:
    machine.has(*(f"10.96.0.{number}" for number in range(1, 200)))
    machine.write_6("".join(SERVICE_6.format(number) for number in range(9)) + ETH0_6, ROUTE_6)

    assert machine.addresses() == ["10.0.0.5", "fd00::2", "192.168.9.5"]


def test_a_machine_whose_only_address_is_in_no_subnet_has_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has(*(f"10.96.0.{number}" for number in range(1, 20)), "10.128.0.5")
    machine.route("eth0", "10.128.0.1", 32)
    machine.route("eth0", "0.0.0.0", 0, gateway="10.128.0.1")

    assert machine.addresses()[0] == "10.128.0.5"


def test_where_the_routes_cannot_be_read_all_addresses_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("10.0.0.5", "172.17.0.1")

    assert machine.addresses() == ["10.0.0.5", "172.17.0.1"]
