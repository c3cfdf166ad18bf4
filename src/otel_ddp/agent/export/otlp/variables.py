"""Reads the OTEL_EXPORTER_OTLP_* variables: those of one signal first, then the general ones."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from opentelemetry.util.re import parse_env_headers

from otel_ddp.agent.export.otlp import Signal
from otel_ddp.settings import Settings, value

_GENERAL = "OTEL_EXPORTER_OTLP_"
HTTP = "http/protobuf"
STANDARD_PORTS = {HTTP: 4318, "grpc": 4317}
# What names of headers have in them whose values are secret.
_SECRET = re.compile("auth|token|key|secret|password|credential|cookie", re.IGNORECASE)


class TlsFiles(NamedTuple):
    """Where the files for TLS are; empty for those that are not configured."""

    certificate: str = ""
    client_key: str = ""
    client_certificate: str = ""


class Variables:
    """What they say of one signal: where it goes, and how. Its own win over the general ones."""

    def __init__(
        self,
        signal: Signal,
        settings: Settings,
        env: Mapping[str, str],
        ports: Mapping[str, int] = STANDARD_PORTS,
    ) -> None:
        self._own = f"{_GENERAL}{signal.upper()}_"
        self._settings = settings
        self._env = env
        self.protocol = str(value(f"{self._own}PROTOCOL", env) or settings.protocol)
        own = env.get(f"{self._own}ENDPOINT", "").strip()
        self.endpoint_variable = f"{self._own if own else _GENERAL}ENDPOINT"
        endpoint = own or settings.endpoint
        self.named = bool(endpoint)
        """Whether people configured the endpoint; else it is the standard port of this machine."""
        self.endpoint = endpoint or f"http://127.0.0.1:{ports[self.protocol]}"
        """As the variable has it: a general one has no path yet."""
        needs_path = not own and self.protocol != "grpc"
        self.url = with_path(self.endpoint, f"/v1/{signal}") if needs_path else self.endpoint
        """Where requests are sent to."""

    def timeout_s(self) -> float:
        """The time that one attempt may take."""
        own = value(f"{self._own}TIMEOUT", self._env)
        return self._settings.timeout_s if own is None else float(own)

    def compression(self) -> str:
        """none, gzip or deflate; by default gzip towards other machines."""
        default = "none" if is_loopback(self.url) else "gzip"
        return str(self._value("COMPRESSION") or default)

    def tls_files(self) -> TlsFiles:
        """Raises OSError for a file that cannot be read, and names it; it may come later."""
        if self.url.lower().startswith("http://"):
            return TlsFiles()
        paths = []
        for variable, path in map(self._read, ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")):
            try:
                if path:
                    with open(path, "rb"):
                        pass
            except OSError as error:
                raise OSError(f"{variable}: {path}: {error.strerror}") from error
            paths.append(path)
        return TlsFiles(*paths)

    def insecure(self) -> bool:
        """Whether gRPC goes without TLS where the address has no scheme."""
        return bool(self._value("INSECURE"))

    def headers(self) -> dict[str, str]:
        """The configured headers, their names in small letters."""
        # What was found, and not named, may be any program: it gets none.
        text = self._read("HEADERS")[1] if self.named else ""
        return dict(parse_env_headers(text, liberal=True))

    def doubt(self) -> str:
        """Of a token, or a password in the address, that leaves this machine readable; or empty."""
        # gRPC takes addresses without a scheme, and a variable that says what one would say.
        bare = "//" not in self.url and self.insecure()
        if not (bare or self.url.lower().startswith("http://")) or is_loopback(self.url):
            return ""
        where = f"goes to {without_credentials(self.url)} without encryption: use https://."
        if any(_SECRET.search(name) for name in self.headers()):
            return f"{self._read('HEADERS')[0]}: a token {where}"
        return f"A password {where}" if take_user(self.url)[1] else ""

    def _value(self, name: str) -> Any:
        own = value(f"{self._own}{name}", self._env)
        return value(f"{_GENERAL}{name}", self._env) if own is None else own

    def _read(self, name: str) -> tuple[str, str]:
        """The variable that counts, and its text."""
        own = self._env.get(f"{self._own}{name}", "").strip()
        variable = f"{self._own if own else _GENERAL}{name}"
        return variable, self._env.get(variable, "").strip()


# -- addresses: what is shown of them, and what is a secret


def without_credentials(url: str, with_path: bool = False) -> str:
    """An address that may be shown: credentials in it are left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the endpoint"
    if not parts.netloc:
        return url.split("?")[0].rpartition("@")[2]
    # A password with a slash ends the host too early.
    behind = url.split("?")[0].rpartition("@")[2] if "@" in url else parts.netloc
    host = behind.partition("/")[0]
    return f"{parts.scheme}://{host}{parts.path if with_path else ''}"


def take_user(url: str) -> tuple[str, str]:
    """An address without its user and password, and the Authorization that they make; or ""."""
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


def with_path(url: str, path: str) -> str:
    """An address with more of a path, before its query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.rstrip('/')}{path}"
    if not parts.netloc:
        return f"{url.rstrip('/')}{path}"
    return parts._replace(path=f"{parts.path.rstrip('/')}{path}", fragment="").geturl()


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
