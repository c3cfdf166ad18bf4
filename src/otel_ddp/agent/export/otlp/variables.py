"""Reads the `OTEL_*` variables: the signals to export, endpoints, protocols, headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from otel_ddp.agent.export.post import TlsFiles, is_loopback, take_user, without_credentials
from otel_ddp.settings import Settings, value

SIGNALS = ("metrics", "traces", "logs")
LANES = {each: f"OTLP {each}" for each in SIGNALS}
"""Each signal is a lane of the export queue, with this name in the log."""

_GENERAL = "OTEL_EXPORTER_OTLP_"
NO_COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT names no collector"
# A header is assumed to be secret if its name contains one of these words.
_SECRET = re.compile("auth|token|key|secret|password|credential|cookie", re.IGNORECASE)


def exported_signals(env: Mapping[str, str]) -> tuple[str, ...]:
    """The signals that the user has not switched off with OTEL_*_EXPORTER=none."""
    return tuple(each for each in SIGNALS if value(f"OTEL_{each.upper()}_EXPORTER", env) != "none")


def signals_with_endpoint(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    """The signals to export, as far as an endpoint of a collector is set for them."""
    return tuple(
        each
        for each in exported_signals(env)
        if settings.endpoint or env.get(f"{_GENERAL}{each.upper()}_ENDPOINT", "").strip()
    )


# -- endpoint, protocol and headers of a signal


class Variables:
    """The OTEL_EXPORTER_OTLP_* variables for a signal. OTEL_EXPORTER_OTLP_METRICS_* and the like
    take precedence for their signal."""

    def __init__(self, signal: str, settings: Settings, env: Mapping[str, str]) -> None:
        self.signal = signal
        self._own = f"{_GENERAL}{signal.upper()}_"
        self._settings = settings
        self._env = env
        self.protocol = str(value(f"{self._own}PROTOCOL", env) or settings.protocol)
        own = env.get(f"{self._own}ENDPOINT", "").strip()
        self.endpoint_variable = f"{self._own if own else _GENERAL}ENDPOINT"
        endpoint = own or settings.endpoint
        # Over HTTP, the endpoint for all signals is a base URL, to which /v1/<signal> is appended.
        needs_path = not own and self.protocol != "grpc"
        url = f"{endpoint.rstrip('/')}/v1/{signal}" if needs_path else endpoint
        self.url, self._authorization = take_user(url)
        """The address for requests, without user and password, which are sent in a header."""

    def timeout_s(self) -> float:
        """The timeout in seconds of connecting, of sending, and of each read."""
        own = value(f"{self._own}TIMEOUT", self._env)
        return self._settings.timeout_s if own is None else float(own)

    def compression(self) -> str:
        """`none` or `gzip`. The default is `gzip`, but `none` towards this machine."""
        default = "none" if is_loopback(self.url) else "gzip"
        return str(self._value("COMPRESSION") or default)

    def tls_files(self) -> TlsFiles:
        """The paths of the TLS files. Raises OSError if one of them cannot be read, perhaps only
        for now."""
        if self.url.lower().startswith("http://"):
            return TlsFiles()
        paths = []
        for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
            path = self._value(name) or ""
            try:
                if path:
                    with open(path, "rb"):
                        pass
            except OSError as error:
                raise OSError(f"{self._read(name)[0]}: {path}: {error.strerror}") from error
            paths.append(path)
        return TlsFiles(*paths)

    def insecure(self) -> bool:
        """Whether gRPC does without TLS if the address has no scheme."""
        return bool(self._value("INSECURE"))

    def headers(self) -> dict[str, str]:
        """The headers of a request, with lower-case names. A user and password in the address
        become the header Authorization."""
        # Imported only now: if the package is broken, `doctor` can still start and report it.
        from opentelemetry.util.re import parse_env_headers

        user = {"authorization": self._authorization} if self._authorization else {}
        return {**user, **parse_env_headers(self._read("HEADERS")[1], liberal=True)}

    def doubt(self) -> str:
        """A warning if a token or password leaves this machine unencrypted; else empty."""
        # gRPC accepts an address without a scheme. Then the variable for `insecure` decides about
        # TLS.
        bare = "//" not in self.url and self.insecure()
        if not (bare or self.url.lower().startswith("http://")) or is_loopback(self.url):
            return ""
        if not any(map(_SECRET.search, self.headers())):
            return ""
        where = without_credentials(self.url)
        return f"A token or password goes to {where} without encryption: use https://."

    def _value(self, name: str) -> Any:
        own = value(f"{self._own}{name}", self._env)
        return value(f"{_GENERAL}{name}", self._env) if own is None else own

    def _read(self, name: str) -> tuple[str, str]:
        """Read a variable as text: the signal's own one if it is set, else the general one. Returns
        the name of the variable, and its text."""
        own = self._env.get(f"{self._own}{name}", "").strip()
        variable = f"{self._own if own else _GENERAL}{name}"
        return variable, self._env.get(variable, "").strip()
