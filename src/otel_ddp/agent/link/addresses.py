"""Where a lead listens, and where followers look for it: names and addresses, and their ports."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from otel_ddp.agent.link.link_thread import within

_RESOLVE_WITHIN_S = 5.0
# A name of a service in Kubernetes may have the addresses of all its pods.
_MOST_OF_NAME = 8
_ALL = "0.0.0.0"
_ALL_6 = "::"


class Place(NamedTuple):
    """An address and a port."""

    address: str
    port: int

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"


async def resolve(host: str) -> list[str]:
    """The addresses of a host; raises OSError."""
    if _is_address(host):
        return [host]
    loop = asyncio.get_running_loop()
    asked = loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    try:
        found = await within(_RESOLVE_WITHIN_S, asked)
    except asyncio.TimeoutError:
        raise OSError(f"its name did not resolve within {_RESOLVE_WITHIN_S:g} s") from None
    except UnicodeError:
        raise OSError("it is no name of a host") from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))[:_MOST_OF_NAME]


async def to_listen_on(
    hosts: Sequence[str], is_local: Callable[[str], bool] | None = None
) -> list[str]:
    """The addresses of this machine that the first of *hosts* means, or the next that means any.

    Mere addresses behind the first host count together: which of them leads here is not known.
    Where no host means an address of this machine, all of its addresses.

    A name that resolves to loopback here (Debian names its machine so) resolves to something else
    on other nodes. Loopback counts only where nothing but loopback itself is named.
    """
    is_local = is_local or _is_local
    others = hosts[1:]
    in_turn = [[each] for each in (*hosts[:1], *(one for one in others if not _is_address(one)))]
    found: list[str] = []
    for together in (*in_turn, [each for each in others if _is_address(each)]):
        here: dict[str, None] = {}
        for host in together:
            with contextlib.suppress(OSError):
                here.update(dict.fromkeys(filter(is_local, await resolve(host))))
        if beyond := [each for each in here if not ipaddress.ip_address(each).is_loopback]:
            return beyond
        found += here
    if found and all(_is_loopback_itself(host) for host in hosts):
        return list(dict.fromkeys(found))
    # That of IPv6 takes both kinds; a kernel may be without it.
    return [_ALL_6 if _is_local(_ALL_6) else _ALL]


def names(addresses: Sequence[str]) -> str:
    """For people."""
    found = [str(ipaddress.ip_address(each)) for each in addresses]
    return ", ".join("all addresses" if each in (_ALL, _ALL_6) else each for each in found)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback_itself(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_local(address: str) -> bool:
    """Whether a socket of this machine can have the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
