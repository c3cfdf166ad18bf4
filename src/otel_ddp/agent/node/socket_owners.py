"""Finds out which users own the sockets of loopback, as the kernel lists them in /proc/net."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc/net")
_ESTABLISHED, LISTENS = "01", "0A"
_ROOT = 0
# One row takes about 150 bytes.
_PIECE, _SMALL_PIECE = 65536, 256

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


def trusted() -> set[int]:
    """Root, and our own user."""
    return {_ROOT, os.geteuid()}


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
    for each in rows(proc, port=own[1]):
        # A socket that its process has closed has no inode, and says that root owns it.
        if (
            each.port == peer[1]
            and each.peer_port == own[1]
            and (each.state, each.address, each.peer) == (_ESTABLISHED, their, our)
            and each.inode
        ):
            return each.uid in trusted()
    return False


def rows(
    proc: Path = _PROC, *, port: int | None = None, only_listeners: bool = False
) -> Iterator[Socket]:
    """All TCP sockets, or those with this port at an end. The kernel lists listeners first."""
    # Most rows of a busy node are of no interest: reading one out takes 20 times as long.
    wanted = b"" if port is None else b":%04X " % port
    size = _SMALL_PIECE if only_listeners else _PIECE
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(proc / name, "rb", buffering=size) as file:
            file.readline()
            for line in file:
                if wanted not in line:
                    continue
                fields = line.decode().split()
                if only_listeners and fields[3] != LISTENS:
                    break
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
