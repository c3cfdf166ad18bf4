"""Finds out to whom the program belongs that listens on a port of loopback."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

from otel_ddp.agent.node import socket_owners

_PROC = Path("/proc/net")
_LOOPBACK = IPv4Address("127.0.0.1")


def is_trusted(port: int, proc: Path = _PROC) -> bool:
    """Whether root or our own user listens there, and nobody else; False where it cannot be told.

    Every user may listen on a port above 1023, and would get what is sent there.
    """
    owners = set(_owners(port, proc))
    return bool(owners) and owners <= socket_owners.trusted()


def is_foreign(port: int, proc: Path = _PROC) -> bool:
    """Whether another user listens there."""
    return not set(_owners(port, proc)) <= socket_owners.trusted()


def _owners(port: int, proc: Path) -> Iterator[int]:
    # Only those that get connections to 127.0.0.1.
    for each in socket_owners.rows(proc, only_listeners=True):
        if each.port == port and (each.address.is_unspecified or each.address == _LOOPBACK):
            yield each.uid
