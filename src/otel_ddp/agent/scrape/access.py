"""Who may read the endpoint: on loopback everyone, beyond it whoever has the token.

On loopback the kernel says which user asks: /proc/net has the owner of each connection's end.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

INSECURE = "insecure"
_PROC = Path("/proc/net")
_ESTABLISHED = "01"
_ROOT = 0
_PIECE = 65536

End = tuple[IPv4Address | IPv6Address, int]
"""An address and a port."""


class Refused(Exception):
    """The endpoint cannot be served like this; the text says why."""


def find_token(setting: str, host: str) -> bytes:
    """The token that an endpoint on this host asks for, empty if none. Raises Refused."""
    if setting.lower() == INSECURE:
        return b""
    if setting:
        return _read_token(Path(setting))
    if ip_address(host).is_loopback:
        return b""
    raise Refused(
        f"{host} is reached from other machines: set OTEL_DDP_SCRAPE_TOKEN_FILE to a file with a "
        f"token (docs/page.md#scrape-metrics), or to {INSECURE} if everyone may read what is served"
    )


def _read_token(path: Path) -> bytes:
    try:
        token = path.read_bytes().strip()
        why = "" if token else "is empty"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    if why:
        raise Refused(f"OTEL_DDP_SCRAPE_TOKEN_FILE names {path}, which {why}")
    return token


def admits(token: bytes, authorization: str) -> bool:
    """Whether a request with this header may be answered."""
    kind, _, given = authorization.partition(" ")
    return not token or hmac.compare_digest(_given_token(kind.lower(), given), token)


def _given_token(kind: str, given: str) -> bytes:
    if kind == "bearer":
        return given.strip().encode()
    # A browser asks a person for a name and a password: the token is the password.
    if kind == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    return b""


# -- which user asks


def is_own(peer: tuple[str, int], own: tuple[str, int], proc: Path = _PROC) -> bool:
    """Whether our own user or root holds the other end of a connection; False if unknown.

    *peer* and *own*: both addresses of the connection, with their ports.
    """
    theirs = _plain(ip_address(peer[0].partition("%")[0])), peer[1]
    ours = _plain(ip_address(own[0].partition("%")[0])), own[1]
    if not theirs[0].is_loopback:
        return False
    owners = (user for ends, user in _connections(proc, own[1]) if ends == (theirs, ours))
    return next(owners, None) in (_ROOT, os.geteuid())


def _connections(proc: Path, port: int) -> Iterator[tuple[tuple[End, End], int]]:
    """The connections with this port at an end: their ends, and the user who holds the first."""
    # Most rows of a busy node are of no interest: reading one out takes 20 times as long.
    wanted = b":%04X " % port
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(proc / name, "rb", buffering=_PIECE) as file:
            for fields in (line.decode().split() for line in file if wanted in line):
                # A socket that its process has closed has no inode, and says that root owns it.
                if fields[3] == _ESTABLISHED and fields[9] != "0":
                    yield (_end(fields[1]), _end(fields[2])), int(fields[7])


def _end(text: str) -> End:
    """As /proc/net has it."""
    address, _, port = text.partition(":")
    # The kernel writes words of four bytes in the machine's own order.
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    found = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return _plain(found), int(port, 16)


def _plain(found: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """An IPv4 address that an IPv6 socket has is that address."""
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
