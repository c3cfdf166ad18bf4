"""Posts bytes to an address over HTTP, through a proxy if the `*_proxy` variables set one."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from ipaddress import ip_address, ip_network
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

UNANSWERED = (OSError, HTTPException)
_PORTS = {"http": 80, "https": 443}
# Characters that a URL may contain as they are. % is one of them, so nothing is encoded twice.
_SAFE = "!#$%&'()*+,/:;=?@[]~"


class TlsFiles(NamedTuple):
    """Paths of the TLS files; empty if not configured."""

    certificate: str = ""
    client_key: str = ""
    client_certificate: str = ""


_NO_FILES = TlsFiles()


class Route:
    """A persistent connection to an address, through a proxy if the `*_proxy` variables set one.

    The timeout applies to connecting, to sending and to each read.
    """

    def __init__(self, url: str, timeout_s: float, tls: TlsFiles = _NO_FILES) -> None:
        """Raises one of the exceptions UNANSWERED if the URL is invalid or a TLS file does not
        load."""
        there, self._headers = _address(url), dict[str, str]()
        host, port = str(there.hostname), there.port or _PORTS[there.scheme]
        proxy = _proxy(there)
        by = (host, port) if proxy is None else (str(proxy.hostname), proxy.port or _PORTS["http"])
        target = there._replace(path=there.path or "/", fragment="")
        if proxy is None or there.scheme == "https":
            target = target._replace(scheme="", netloc="")
        self._target = quote(target.geturl(), _SAFE)
        if there.scheme == "https":
            context = ssl.create_default_context(cafile=tls.certificate or None)
            if tls.client_certificate:
                # With an empty password, OpenSSL does not prompt for one if the key is encrypted.
                context.load_cert_chain(tls.client_certificate, tls.client_key or None, "")
            self._connection: HTTPConnection = HTTPSConnection(
                *by, timeout=timeout_s, context=context
            )
        else:
            self._connection = HTTPConnection(*by, timeout=timeout_s)
        if proxy is not None:
            _, authorization = take_user(proxy.geturl())
            headers = {"Proxy-Authorization": authorization} if authorization else {}
            if there.scheme == "https":
                self._connection.set_tunnel(host, port, headers)
            else:
                self._headers = headers

    def post(self, body: bytes, headers: Mapping[str, str]) -> HTTPResponse:
        """Send a request. Raises one of UNANSWERED, or ValueError if a header cannot be sent."""
        connection = self._connection
        if connection.sock is not None:
            # There is something to read although no request is pending: the server has closed the
            # connection.
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if poll.poll(0):
                connection.close()
        try:
            connection.request("POST", self._target, body, {**headers, **self._headers})
        except (BrokenPipeError, ConnectionResetError):
            # The server may have answered before it stopped reading, so try to read an answer.
            if connection.sock is None:
                raise
        return connection.getresponse()

    def close(self) -> None:
        self._connection.close()


def _address(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            # Raises UnicodeError for a host name that is no possible DNS name.
            parts.hostname.encode("idna")
            return parts
    except ValueError:
        pass
    raise InvalidURL(url)


def _proxy(there: SplitResult) -> SplitResult | None:
    """The proxy that the `*_proxy` variables set for this address."""
    host, named = str(there.hostname), getproxies()
    url = named.get(there.scheme) or named.get("all")
    # No proxy for a loopback address: it would connect to its own machine instead of ours.
    if not url or is_loopback(there.geturl()) or proxy_bypass(f"{host}:{there.port or ''}"):
        return None
    for each in named.get("no", "").split(","):
        with contextlib.suppress(ValueError):
            if ip_address(host) in ip_network(each.strip(), strict=False):
                return None
    with contextlib.suppress(InvalidURL):
        found = _address(url if "://" in url else f"http://{url}")
        if found.scheme == "http":
            return found
    raise OSError("a proxy has to be of http://")


def explain(error: BaseException, where: str, timeout_s: float) -> str:
    """Explain to users why a request was not answered. Shows *where* instead of the full address,
    which may contain a password."""
    if isinstance(error, InvalidURL):
        return f"{where} is no address to send to; http://host:4318 would be one"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS to {where} failed: certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS to {where} failed: {error.reason or 'no handshake'}"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused by {where}"
    if isinstance(error, socket.gaierror):
        return f"the host name of {where} does not resolve"
    if isinstance(error, TimeoutError):
        return f"no answer from {where} within {timeout_s:g} s"
    if isinstance(error, ConnectionError):
        return f"connection closed by {where}"
    said = getattr(error, "strerror", None) or (str(error) if type(error) is OSError else "")
    return f"no way to {where}: {one_line(said) or type(error).__name__}"


# -- addresses without their credentials


def one_line(text: str, limit: int = 200) -> str:
    """Text from a collector, made safe and short for one line of a log."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return words if len(words) <= limit else words[:limit] + "…"


def without_credentials(url: str, with_path: bool = False) -> str:
    """The address as shown to users, without credentials."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the endpoint"
    if not parts.netloc:
        return url.split("?")[0].rpartition("@")[2]
    # The password may contain a slash, at which urlsplit would end the host. So take the host from
    # behind the last "@".
    behind = url.split("?")[0].rpartition("@")[2] if "@" in url else parts.netloc
    host = behind.partition("/")[0]
    return f"{parts.scheme}://{host}{parts.path if with_path else ''}"


def take_user(url: str) -> tuple[str, str]:
    """The address without user and password, and the Authorization header for them, or ""."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url, ""
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, ""
    pair = unquote(user) if ":" in user else f"{unquote(user)}:"
    packed = base64.b64encode(pair.encode()).decode()
    return parts._replace(netloc=host).geturl(), f"Basic {packed}"


def is_loopback(url: str) -> bool:
    """Whether an address is a loopback address, so that data does not leave this machine."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
