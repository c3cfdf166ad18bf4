"""Finds the addresses of this machine under which other nodes may reach it."""

from __future__ import annotations

import contextlib
import socket

# Addresses of documentation, which no machine has: the way to them is that to a gateway.
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def _leaves_by(family: int, far: str) -> str:
    """Our address on the way to another one. To connect a datagram socket sends nothing."""
    # Of a name this raises: a name server may keep a training waiting. So does no way to it.
    with contextlib.suppress(OSError):
        socket.inet_pton(family, far)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return ""


def addresses_here(master: str = "") -> list[str]:
    """The likeliest first. *master*: where the run's store is; a name tells nothing here."""
    ways = [*((family, master) for family in _FAR), *_FAR.items()]
    found = dict.fromkeys(_leaves_by(family, far) for family, far in ways)
    return [each for each in found if each and each != "::1" and not each.startswith("127.")]
