"""The lead of a run, i.e. the agent that judges it: its addresses, and the secret of the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from otel_ddp import files

FACT = "lead"
"""The name of a journal's fact on the lead. The fact has the secret, so it stays on the node."""

_SECRET_BYTES = 32
_SECRET = re.compile(r"[0-9a-f]{64}")
# A host name, or an IP address, which may end with `%` and a network interface.
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_MOST_HOSTS = 8
_MOST_PORTS = 8
_MOST_BYTES = 4096

# The lead's ports are from this range, below the ephemeral ports of Linux and the node ports of
# Kubernetes, so that other programs rarely use them.
_PORTS = range(20000, 30000)
_CANDIDATES = 4


class Lead(NamedTuple):
    """How to reach the lead of a run. Whoever has the secret can speak to all agents of the run."""

    secret: str
    hosts: tuple[str, ...]
    """Names and addresses of the lead's node, the most likely to work first. Some may not work."""
    ports: tuple[int, ...]
    """Candidates for the lead's port. The lead listens on the first one that is free."""

    def __repr__(self) -> str:
        # Leave out the secret, as this text may be logged.
        return f"Lead(hosts={self.hosts}, ports={self.ports})"

    def with_hosts(self, hosts: Iterable[str]) -> Lead:
        """The same lead at the valid ones of these hosts, at most _MOST_HOSTS of them."""
        fit = dict.fromkeys(host for host in hosts if _HOST.fullmatch(host))
        return self._replace(hosts=tuple(fit)[:_MOST_HOSTS])

    def as_json(self) -> dict[str, Any]:
        """The lead as JSON, for a journal."""
        return {"secret": self.secret, "hosts": list(self.hosts), "ports": list(self.ports)}

    def as_text(self) -> str:
        """The lead in one line, for the store of the process group."""
        return json.dumps(self.as_json(), separators=(",", ":"))


def propose(hosts: Iterable[str] = ()) -> Lead:
    """A lead with a new random secret, and with random ports, of which one is probably free."""
    # Do not use `random`: training scripts seed it, so each run would have the same secret.
    drawn = os.urandom(_SECRET_BYTES + 2 * _CANDIDATES)
    numbers = memoryview(drawn[_SECRET_BYTES:]).cast("H")
    ports = dict.fromkeys(_PORTS[number % len(_PORTS)] for number in numbers)
    return Lead(drawn[:_SECRET_BYTES].hex(), (), tuple(ports)).with_hosts(hosts)


def parse(content: Any) -> Lead | None:
    """The inverse of `as_json`; None if *content* is no lead."""
    if not isinstance(content, Mapping):
        return None
    secret, hosts, ports = (content.get(name) for name in Lead._fields)
    if (
        not (isinstance(secret, str) and _SECRET.fullmatch(secret))
        or not (isinstance(hosts, list) and len(hosts) <= _MOST_HOSTS)
        or not all(isinstance(host, str) and _HOST.fullmatch(host) for host in hosts)
        or not (isinstance(ports, list) and 1 <= len(ports) <= _MOST_PORTS)
        or not all(type(port) is int and 0 < port < 1 << 16 for port in ports)
    ):
        return None
    return Lead(secret, tuple(hosts), tuple(ports))


def parse_text(text: str) -> Lead | None:
    """The inverse of `as_text`; None if *text* is no lead, as from another program."""
    if len(text) > _MOST_BYTES:
        return None
    try:
        return parse(files.parse_json(text))
    except ValueError:
        return None


# -- addresses of this machine that other nodes may reach

# Addresses that are reserved for documentation. No network has them, so packets to them take the
# default route.
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def _leaves_by(family: int, far: str) -> str:
    """Our own address for packets to the address *far*; empty if there is no route."""
    # `inet_pton` refuses a host name, since to look it up could block the training. `connect` of a
    # UDP socket sends nothing; it fails if there is no route.
    with contextlib.suppress(OSError):
        socket.inet_pton(family, far)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return ""


def addresses_here(master: str = "") -> list[str]:
    """The addresses of this node, the most likely to be reachable from other nodes first.

    *master*: the address of the run's store. It is ignored if it is a host name.
    """
    ways = [*((family, master) for family in _FAR), *_FAR.items()]
    found = dict.fromkeys(_leaves_by(family, far) for family, far in ways)
    return [each for each in found if each and each != "::1" and not each.startswith("127.")]
