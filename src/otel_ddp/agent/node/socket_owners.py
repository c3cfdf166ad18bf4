"""Finds out which user holds the other end of a connection on loopback, by /proc/net."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc/net")
_ESTABLISHED = "01"
_ROOT = 0
_PIECE = 65536

Address = IPv4Address | IPv6Address


class Socket(NamedTuple):
    """A row of the table."""

    state: str
    address: Address
    port: int
    peer: Address
    peer_port: int
    uid: int
    inode: int


def is_own(peer: tuple[str, int], own: tuple[str, int], proc: Path = _PROC) -> bool:
    """Whether our own user or root holds the other end of a connection; False if unknown.

    *peer* and *own*: both addresses of the connection, with their ports.
    """
    try:
        their, our = _plain(ip_address(peer[0].partition("%")[0])), _plain(ip_address(own[0]))
    except ValueError:
        return False
    if not their.is_loopback:
        return False
    for each in _rows(proc, own[1]):
        # A socket that its process has closed has no inode, and says that root owns it.
        if (
            each.port == peer[1]
            and each.peer_port == own[1]
            and (each.state, each.address, each.peer) == (_ESTABLISHED, their, our)
            and each.inode
        ):
            return each.uid in (_ROOT, os.geteuid())
    return False


def _rows(proc: Path, port: int) -> Iterator[Socket]:
    """The TCP sockets with this port at an end."""
    # Most rows of a busy node are of no interest: reading one out takes 20 times as long.
    wanted = b":%04X " % port
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(proc / name, "rb", buffering=_PIECE) as file:
            file.readline()
            for line in file:
                if wanted not in line:
                    continue
                fields = line.decode().split()
                with contextlib.suppress(ValueError, IndexError):
                    yield Socket(
                        *(fields[3], *_end(fields[1]), *_end(fields[2])),
                        uid=int(fields[7]),
                        inode=int(fields[9]),
                    )


def _end(text: str) -> tuple[Address, int]:
    """An address and its port; as in /proc/net."""
    address, _, port = text.partition(":")
    # The kernel writes words of four bytes in the machine's own order.
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    found = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return _plain(found), int(port, 16)


def _plain(found: Address) -> Address:
    """An IPv4 address that an IPv6 socket has is that address."""
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
