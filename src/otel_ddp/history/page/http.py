"""HTTP of the page: requests, answers in JSON, and the checks that refuse requests."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"


class Refused(Exception):
    """The request is refused; the message has the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Question(NamedTuple):
    """A request. Header names are in lower case."""

    path: str
    query: Mapping[str, Sequence[str]] = {}
    method: str = "GET"
    headers: Mapping[str, str] = {}
    is_private: Callable[[], bool] = lambda: True
    """Returns whether the client may read more than /metrics."""
    has_token: bool = False
    """Whether the request has a bearer token, which browsers do not send by themselves."""

    @classmethod
    def of_address(cls, target: str, **more: Any) -> Question:
        """Parse a request. *target*: its path and query, which `check_request` has accepted."""
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=1000)
        except ValueError:
            raise Refused(400, "the address cannot be read") from None
        return cls(parts.path, query, **more)

    def text(self, name: str, default: str = "") -> str:
        return (self.query.get(name) or (default,))[-1]

    @property
    def group(self) -> str | None:
        """The requested group; None if the request means the newest group."""
        return self.text("group") if "group" in self.query else None

    def texts(self, name: str) -> Sequence[str]:
        return self.query.get(name, ())

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """The integer parameter *name*, clamped to *low* and *high*; *default* if not given."""
        text = self.text(name)
        if not text:
            return default
        try:
            return min(max(int(text), low), high)
        except ValueError:
            raise Refused(400, f"{name} must be a whole number, not {text[:40]!r}") from None


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def json_text(content: Any, **how: Any) -> str:
    """JSON with null for NaN and infinities. *how*: arguments of `json.dumps`."""
    # `default=str`: a history from another machine may have bytes instead of text.
    try:
        return json.dumps(content, allow_nan=False, default=str, **how)
    except ValueError:
        return json.dumps(_plain(content), default=str, **how)


def as_json(status: int, content: Any) -> Answer:
    # "replace": a text that was cut may end with half a surrogate pair, which UTF-8 cannot encode.
    body = json_text(content, separators=(",", ":")).encode("utf-8", "replace")
    return Answer(status, {"Content-Type": JSON}, body)


def as_text(status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
    body = text.encode("utf-8", "replace")
    return Answer(status, {"Content-Type": TEXT, **(headers or {})}, body)


def _plain(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(each) for each in content]
    return content


# -- requests that are refused

# Matches a Host header: a name or an IP address, and perhaps a port, but no user name, no escapes
# and no network interface.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.I | re.ASCII)
# A POST must have this header, which a form of another site cannot set.
ASKED = "x-otel-ddp"
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    # For all answers but the page: the page sends a policy of its own.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def check_request(target: str, headers: Message, *, any_name: bool = False) -> None:
    """Raises Refused for a request by another site.

    A hostile site may resolve its own name to this machine, so that its scripts can read our
    answers (DNS rebinding). The Host header then has the name of the site, so a Host that is no
    name of this machine is refused. *any_name*: accept any Host, if requests need a token.
    """
    if not target.startswith("/") or target.startswith("//"):
        raise Refused(400, "ask for a path on this machine, such as /metrics")
    hosts = [str(host) for host in headers.get_all("Host", [])]
    if len(hosts) > 1:
        raise Refused(400, "name one Host")
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
    """Whether a script of another site sent the request."""
    if site := headers.get("Sec-Fetch-Site"):
        return site not in ("same-origin", "none")
    # Browsers omit Sec-Fetch-Site if the page came by plain HTTP from another machine. So compare
    # the header Origin with the Host.
    named = [host.strip().lower() for host in hosts]
    origins = [str(each).strip().lower() for each in headers.get_all("Origin", [])]
    return any(origin.partition("://")[2] not in named for origin in origins)


def check_post(headers: Mapping[str, str]) -> None:
    """Raises Refused for a POST by another site: its scripts cannot set the header ASKED."""
    if headers.get(ASKED) != "page":
        raise Refused(403, f"send the header {ASKED}: page")


def _is_ours(host: str) -> bool:
    # Do not look up the name in DNS, because another site could control the answer.
    own = socket.gethostname().lower()
    if host in ("localhost", own, own.partition(".")[0]) or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
