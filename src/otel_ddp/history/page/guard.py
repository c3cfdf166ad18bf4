"""Which requests are answered: of which hosts, of which sites, and with which headers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from otel_ddp.history.page.exchange import Refused

_RESOLV_CONF = Path("/etc/resolv.conf")
# Asked for by name: a form of another site cannot set it.
ASKED = "x-otel-ddp"
HEADERS: Mapping[str, str] = {
    # The library of plots writes styles, and makes pictures out of blobs and data addresses.
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def check(headers: Mapping[str, str], *, api: bool) -> None:
    """Raises Refused for a request that another site has caused.

    A site may let its own name point to this machine: then its scripts could read all that is
    served. The name in the request gives that away.
    """
    host = _name(headers.get("host", ""))
    if not _is_ours(host):
        raise Refused(
            403,
            f"{host[:200]!r} is no name of this machine: open the page as localhost, by an address "
            f"of this machine, or as {socket.gethostname()}",
        )
    if api and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "another site may not read this")


def check_asked(headers: Mapping[str, str]) -> None:
    """Raises Refused for a POST that our own page has not sent."""
    if headers.get(ASKED) != "page":
        raise Refused(403, f"send the header {ASKED}: page")


def _name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


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
    if host in ("", "localhost") or host.endswith(".localhost") or host in _own_names():
        return True
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
