"""Where the agent that leads a run is reached, and the secret that only the run's nodes know."""

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
"""The fact of a journal that holds it. It never leaves the node."""

_SECRET_BYTES = 32
_SECRET = re.compile(r"[0-9a-f]{64}")
# A name, an address of either version, one with its interface.
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_MOST_HOSTS = 8
_MOST_PORTS = 8
_MOST_BYTES = 4096

# Below the ports that Linux gives to outgoing connections, and those that Kubernetes gives out.
_PORTS = range(20000, 30000)
_CANDIDATES = 4


class Lead(NamedTuple):
    """The lead of a run. Who knows the secret can speak to the agents of all its nodes."""

    secret: str
    """32 bytes in hexadecimal."""
    hosts: tuple[str, ...]
    """Names and addresses of its node, the likeliest first; not all need to be right."""
    ports: tuple[int, ...]
    """It listens on the first one that is free there."""

    def __repr__(self) -> str:
        # It may find its way into a log.
        return f"Lead(hosts={self.hosts}, ports={self.ports})"

    def with_hosts(self, hosts: Iterable[str]) -> Lead:
        """This one at these hosts, as many as a record may have."""
        fit = dict.fromkeys(host for host in hosts if _HOST.fullmatch(host))
        return self._replace(hosts=tuple(fit)[:_MOST_HOSTS])

    def as_json(self) -> dict[str, Any]:
        """As a journal and a store hold it."""
        return {"secret": self.secret, "hosts": list(self.hosts), "ports": list(self.ports)}

    def as_text(self) -> str:
        """The same as one line."""
        return json.dumps(self.as_json(), separators=(",", ":"))


def propose(hosts: Iterable[str] = ()) -> Lead:
    """A lead with a secret that no other has, at ports that may be free."""
    # Not `random`: training scripts seed it.
    drawn = os.urandom(_SECRET_BYTES + 2 * _CANDIDATES)
    numbers = memoryview(drawn[_SECRET_BYTES:]).cast("H")
    ports = dict.fromkeys(_PORTS[number % len(_PORTS)] for number in numbers)
    return Lead(drawn[:_SECRET_BYTES].hex(), (), tuple(ports)).with_hosts(hosts)


def parse(content: Any) -> Lead | None:
    """What `as_json` has made; None for anything else."""
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
    """What `as_text` has made; None for anything else, which another program may have written."""
    if len(text) > _MOST_BYTES:
        return None
    try:
        return parse(files.parse_json(text))
    except ValueError:
        return None


# -- the addresses of this machine under which other nodes may reach it

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
