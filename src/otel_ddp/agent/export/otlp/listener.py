"""Finds out to whom the program belongs that listens on a port of loopback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_PROC = Path("/proc/net")
_LISTENS = "0A"
_ROOT = 0
_LOOPBACK = IPv4Address("127.0.0.1")


def is_trusted(port: int, proc: Path = _PROC) -> bool:
    """Whether root or our own user listens there, and nobody else; False where it cannot be told.

    Every user may listen on a port above 1023, and would get what is sent there.
    """
    owners = set(_owners(port, proc))
    return bool(owners) and owners <= {_ROOT, os.geteuid()}


def is_foreign(port: int, proc: Path = _PROC) -> bool:
    """Whether another user listens there."""
    return not set(_owners(port, proc)) <= {_ROOT, os.geteuid()}


def _owners(port: int, proc: Path) -> Iterator[int]:
    for name in ("tcp", "tcp6"):
        # Read in small pieces: the kernel lists connections behind the listeners, and there may be
        # many.
        with contextlib.suppress(OSError), open(proc / name, "rb", buffering=256) as file:
            file.readline()
            for line in file:
                fields = line.decode().split()
                if fields[3] != _LISTENS:
                    break
                address, _, hexadecimal = fields[1].partition(":")
                if int(hexadecimal, 16) == port and _gets_loopback(address):
                    yield int(fields[7])


def _gets_loopback(address: str) -> bool:
    """Whether a socket with this address takes connections to 127.0.0.1; as in /proc/net."""
    # The kernel writes words of four bytes in the machine's own order.
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    found = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    return found.is_unspecified or found == _LOOPBACK
