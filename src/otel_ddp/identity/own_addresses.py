"""Finds the addresses of this machine under which other nodes may reach it.

It reads the kernel's tables alone: a training process opens no socket and asks no name server.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from os.path import isdir
from pathlib import Path
from typing import NamedTuple

from otel_ddp import files

_MOST_BYTES = 1 << 20
# How likely others reach an address, by the routes of its interface.
_IS_MASTER, _TOWARDS_MASTER, _BEFORE_GATEWAY, _IN_SUBNET, _ALONE = range(5)

# As the kernel writes its tables. That of routes has our own addresses too, without interfaces.
_OWN_4 = re.compile(r"\|-- ([0-9.]+)\n +/32 host LOCAL")
_ROUTE_4 = re.compile(
    r"^(\S+)\t([0-9A-F]{8})\t([0-9A-F]{8})\t\w+\t\d+\t\d+\t(\d+)\t([0-9A-F]{8})\t", re.MULTILINE
)
# Of scope 00, which is global: neither loopback's nor a link's own.
_OWN_6 = re.compile(r"^([0-9a-f]{32}) \w+ ([0-9a-f]{2}) 00 \w+ +(\S+)$", re.MULTILINE)
# Without routes to one address: each of our own has two of these.
_ROUTE_6 = re.compile(
    r"^([0-9a-f]{32}) (?!80)([0-9a-f]{2}) \w+ \w+ ([0-9a-f]{32}) ([0-9a-f]{8}) .* (\S+)$",
    re.MULTILINE,
)
_ALL_6 = (1 << 128) - 1


class _Own(NamedTuple):
    text: str
    number: int
    interface: str
    """Empty: the address is in no subnet."""


class _Route(NamedTuple):
    interface: str
    network: int
    mask: int
    gateway: int
    metric: int


def addresses_here(
    master: str = "", proc: Path = Path("/proc"), interfaces: Path = Path("/sys/class/net")
) -> list[str]:
    """The likeliest first. *master*: where the run's store is; a name tells nothing here.

    The address of a bridge counts if the master or a gateway is behind it. That of docker0 or
    virbr0 does not: behind it are containers and virtual machines of this node.
    """
    net = proc / "self/net"
    routes_4, routes_6 = _routes_4(net), _routes_6(net)
    master_4, master_6 = (_number(each, master) for each in (socket.AF_INET, socket.AF_INET6))
    found = _reached(_own_4(net, routes_4), routes_4, master_4, interfaces)
    found.update(_reached(_own_6(net, routes_6), routes_6, master_6, interfaces))
    return sorted(found, key=found.__getitem__)


def _reached(
    own: Sequence[_Own], routes: Sequence[_Route], master: int | None, interfaces: Path
) -> dict[str, int]:
    """How likely each address is reached; without those that no other node can reach."""
    beyond = _before_gateways(routes)
    towards = "" if master is None else _towards(routes, master)
    found, alone = {}, []
    for each in own:
        if each.number == master:
            found[each.text] = _IS_MASTER
        elif not each.interface:
            alone.append(each)
        elif each.interface == towards:
            found[each.text] = _TOWARDS_MASTER
        elif each.interface in beyond:
            found[each.text] = _BEFORE_GATEWAY
        elif not isdir(interfaces / each.interface / "bridge"):
            found[each.text] = _IN_SUBNET
    if not any(likely <= _BEFORE_GATEWAY for likely in found.values()):
        # Some clouds and pods give a machine no other address. Where it has one, these are those
        # of services: kube-ipvs0 has hundreds.
        gateways = [each.gateway for each in routes if each.gateway]
        alone.sort(key=lambda each: min((each.number ^ at for at in gateways), default=0))
        found.update((each.text, _ALONE) for each in alone)
    return found


def _before_gateways(routes: Sequence[_Route]) -> set[str]:
    """The interfaces that lead to other networks than their own."""
    return {each.interface for each in routes if each.gateway or not each.mask}


def _towards(routes: Sequence[_Route], address: int) -> str:
    # The kernel takes the narrowest route, and of equal ones the cheapest.
    leading = [each for each in routes if address & each.mask == each.network]
    best = max(leading, key=lambda each: (each.mask, -each.metric), default=None)
    return "" if best is None else best.interface


def _own_4(net: Path, routes: Sequence[_Route]) -> list[_Own]:
    # No subnet is behind a gateway, or in a route to one address.
    subnets = [each for each in routes if not each.gateway and 0 < each.mask < 0xFFFF_FFFF]
    found = []
    for text in dict.fromkeys(_OWN_4.findall(_text(net / "fib_trie"))):
        number = _number(socket.AF_INET, text)
        if number is not None and not text.startswith("127."):
            found.append(_Own(text, number, _towards(subnets, number)))
    return found


def _own_6(net: Path, routes: Sequence[_Route]) -> list[_Own]:
    beyond = _before_gateways(routes)
    return [
        _Own(_text_6(digits), int(digits, 16), interface)
        for digits, bits, interface in _OWN_6.findall(_text(net / "if_inet6"))
        if interface in beyond or bits != "80"
    ]


def _routes_4(net: Path) -> list[_Route]:
    return [
        _Route(interface, _in_order(network), _in_order(mask), _in_order(gateway), int(metric))
        for interface, network, gateway, metric, mask in _ROUTE_4.findall(_text(net / "route"))
    ]


def _routes_6(net: Path) -> list[_Route]:
    return [
        _Route(
            *(interface, int(network, 16), _ALL_6 ^ (_ALL_6 >> int(bits, 16))),
            *(int(gateway, 16), int(metric, 16)),
        )
        for network, bits, gateway, metric, interface in _ROUTE_6.findall(_text(net / "ipv6_route"))
        # Through loopback goes what the kernel refuses.
        if interface != "lo"
    ]


def _in_order(digits: str) -> int:
    """A number that the kernel writes as it lies in memory."""
    return socket.ntohl(int(digits, 16))


def _number(family: int, address: str) -> int | None:
    try:
        return int.from_bytes(socket.inet_pton(family, address), "big")
    except (OSError, ValueError):
        return None  # a name, or an address of the other kind


def _text_6(digits: str) -> str:
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _text(path: Path) -> str:
    return files.read_text(path, _MOST_BYTES) or ""
