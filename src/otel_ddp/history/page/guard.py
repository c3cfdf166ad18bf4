"""Which requests are answered: of which hosts, of which sites, and with which headers."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from email.message import Message
from ipaddress import ip_address
from pathlib import Path

from otel_ddp.history.page.exchange import Refused

_RESOLV_CONF = Path("/etc/resolv.conf")
# A name or an address with its port: no user, no escapes, no zone.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.I | re.ASCII)
# Asked for by name: a form of another site cannot set it.
ASKED = "x-otel-ddp"
HEADERS: Mapping[str, str] = {
    # Of all but the page, which has its own.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def check(target: str, headers: Message, *, any_name: bool = False) -> None:
    """Raises Refused for a request that another site has caused.

    A site may let its own name point to this machine: then its scripts could read all that is
    served. The name in the request gives that away.

    *any_name*: if a token is asked for, which another site's script does not have.
    """
    if not target.startswith("/") or target.startswith("//"):
        raise Refused(400, "ask for a path on this machine, such as /metrics")
    hosts = [str(host) for host in headers.get_all("Host", [])]
    if len(hosts) > 1:
        raise Refused(400, "name one Host")
    # A browser always names one.
    for host in hosts:
        found = _HOST.fullmatch(host.strip())
        if found is None:
            raise Refused(400, f"{host[:200]!r} is no name or address with a port")
        name = (found[1] or found[2]).lower().removesuffix(".")
        if not any_name and not _is_ours(name):
            raise Refused(
                403,
                f"{host[:200]!r} is no name of this machine: use localhost, an address of this "
                f"machine, or {socket.gethostname()}",
            )
    if target.startswith("/api/") and _is_foreign(headers, hosts):
        raise Refused(403, "another site may not read this")


def _is_foreign(headers: Message, hosts: Sequence[str]) -> bool:
    """Whether the script of another site asks."""
    if site := headers.get("Sec-Fetch-Site"):
        return site not in ("same-origin", "none")
    # A browser says no more of a page that came unencrypted from another machine.
    named = [host.strip().lower() for host in hosts]
    origins = [str(each).strip().lower() for each in headers.get_all("Origin", [])]
    return any(origin.partition("://")[2] not in named for origin in origins)


def check_asked(headers: Mapping[str, str]) -> None:
    """Raises Refused for a POST that our own page has not sent."""
    if headers.get(ASKED) != "page":
        raise Refused(403, f"send the header {ASKED}: page")


def _own_names() -> set[str]:
    """Our host name, alone and in the domains of this network. No name server is asked."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    names = {own, short}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in _RESOLV_CONF.read_text().splitlines():
            keyword, *domains = line.lower().split() or [""]
            if keyword in ("search", "domain"):
                names.update(f"{short}.{domain.strip('.')}" for domain in domains)
    return names


def _is_ours(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost") or host in _own_names():
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
